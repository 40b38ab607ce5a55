// Job state words, through which client and mover agree without a message.
//
// A word is generation << 8 | state, a 64-bit atomic in a memfd that client and mover map. Every change is one
// sequentially consistent compare-and-swap, so each side can be killed or stopped at any instruction:
//
//   FREE ─► LIVE ─► SUBMITTED ─► DONE          store: LIVE or SUBMITTED ─► ABANDONED (client)
//            │           └─────► FAILED        retrieve:        LIVE ─► ABANDONED (client)
//            └─────────────────► FAILED        any end ─► LIVE of the next generation (client)
//
// Bytes are ordered before words: the side that sets DONE has made its copies visible before, and a side that reads
// DONE sees them. The client's memory is not trusted: a swap fails if the word has any other value than expected.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "base/shared_memory.h"

namespace kv {

enum class WordState : uint8_t { FREE = 0, LIVE = 1, SUBMITTED = 2, DONE = 3, ABANDONED = 4, FAILED = 5 };

struct Word {
    uint64_t generation;
    WordState state;
};

// A mapped board, used by both sides; each call says which side may make it.
// Thread-safe: every call is one atomic operation or a loop of compare-and-swaps. bad_argument for a word that the
// board has not.
class Board {
  public:
    Board(int fd, uint32_t words);

    Word read(uint32_t word) const;
    bool is(uint32_t word, uint64_t generation, WordState state) const;

    // Mover: exactly (generation, from) → (generation, to). False when the word has any other value.
    bool swap(uint32_t word, uint64_t generation, WordState from, WordState to);

    // Client: FREE or any end → LIVE under the next generation, which is returned. bad_argument while in use.
    uint64_t begin(uint32_t word);
    // Client: LIVE or SUBMITTED → ABANDONED. Returns the state afterwards.
    WordState abandon_store(uint32_t word, uint64_t generation);
    // Client: LIVE → ABANDONED. Returns the state afterwards.
    WordState abandon_retrieve(uint32_t word, uint64_t generation);

  private:
    std::atomic<uint64_t>& at(uint32_t word) const;
    WordState abandon(uint32_t word, uint64_t generation, bool submitted_too);

    Mapping mapping_;
    uint32_t words_;
};

// The boards of a mover's sessions. Not thread-safe.
class Boards {
  public:
    // The board must be sealed against shrinking, since words are changed without the guard against SIGBUS.
    // bad_argument when the session has one already.
    void map(uint64_t session, int fd, uint32_t words);
    // bad_argument, here and below, when the session has none.
    void drop(uint64_t session);
    const std::shared_ptr<Board>& of(uint64_t session) const;

  private:
    std::unordered_map<uint64_t, std::shared_ptr<Board>> boards_;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock inside shared memory would die with its owner");
static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));

}  // namespace kv
