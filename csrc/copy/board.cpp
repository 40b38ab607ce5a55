#include "copy/board.h"

#include <fcntl.h>

#include <cinttypes>

#include "base/check.h"

namespace kv {
namespace {

constexpr uint64_t pack(uint64_t generation, WordState state) { return generation << 8 | static_cast<uint64_t>(state); }

constexpr Word unpack(uint64_t raw) { return {raw >> 8, static_cast<WordState>(raw & 0xff)}; }

}  // namespace

Board::Board(int fd, uint32_t words) : words_(words) {
    const uint64_t needed = uint64_t{words} * sizeof(uint64_t);
    const uint64_t present = file_bytes(fd);
    if (words == 0 || present < needed) {
        bad_argument(
            format("a board of %u words needs %" PRIu64 " bytes, its file has %" PRIu64, words, needed, present));
    }
    mapping_ = Mapping(fd, needed, "the board");
}

std::atomic<uint64_t>& Board::at(uint32_t word) const {
    if (word >= words_) bad_argument(format("word=%u must be in [0, %u)", word, words_));
    return reinterpret_cast<std::atomic<uint64_t>*>(mapping_.data())[word];
}

Word Board::read(uint32_t word) const { return unpack(at(word).load()); }

bool Board::is(uint32_t word, uint64_t generation, WordState state) const {
    return at(word).load() == pack(generation, state);
}

bool Board::swap(uint32_t word, uint64_t generation, WordState from, WordState to) {
    uint64_t expected = pack(generation, from);
    return at(word).compare_exchange_strong(expected, pack(generation, to));
}

uint64_t Board::begin(uint32_t word) {
    std::atomic<uint64_t>& cell = at(word);
    uint64_t raw = cell.load();
    for (;;) {
        const Word before = unpack(raw);
        if (before.state == WordState::LIVE || before.state == WordState::SUBMITTED) {
            bad_argument(format("word %u is in use: generation %" PRIu64 ", state %d", word, before.generation,
                                static_cast<int>(before.state)));
        }
        if (cell.compare_exchange_weak(raw, pack(before.generation + 1, WordState::LIVE))) return before.generation + 1;
    }
}

WordState Board::abandon(uint32_t word, uint64_t generation, bool submitted_too) {
    std::atomic<uint64_t>& cell = at(word);
    uint64_t raw = cell.load();
    for (;;) {
        const Word now = unpack(raw);
        if (now.generation != generation) {
            bad_argument(format("word %u has generation %" PRIu64 ", not %" PRIu64, word, now.generation, generation));
        }
        const bool open = now.state == WordState::LIVE || (submitted_too && now.state == WordState::SUBMITTED);
        if (!open) return now.state;
        if (cell.compare_exchange_weak(raw, pack(generation, WordState::ABANDONED))) return WordState::ABANDONED;
    }
}

WordState Board::abandon_store(uint32_t word, uint64_t generation) { return abandon(word, generation, true); }

WordState Board::abandon_retrieve(uint32_t word, uint64_t generation) { return abandon(word, generation, false); }

void Boards::map(uint64_t session, int fd, uint32_t words) {
    const int seals = file_seals(fd);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        throw Refusal("descriptor-seal", "a board must be a memfd that is sealed against shrinking");
    }
    if (!boards_.emplace(session, std::make_shared<Board>(fd, words)).second) {
        bad_argument(format("session %" PRIu64 " has a board already", session));
    }
}

void Boards::drop(uint64_t session) {
    of(session);
    boards_.erase(session);
}

const std::shared_ptr<Board>& Boards::of(uint64_t session) const {
    const auto found = boards_.find(session);
    if (found == boards_.end()) bad_argument(format("session %" PRIu64 " has no board", session));
    return found->second;
}

}  // namespace kv
