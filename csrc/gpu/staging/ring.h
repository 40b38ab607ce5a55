// The staging ring, through which mover and client pass segments of staging to each other without messages or waits.
//
// A memfd that both map: a header, then for each lane (store, retrieve) its segments' cells, lists and sums. A cell's
// word is sequence << 8 | state; every change is one sequentially consistent compare-and-swap, so either side may be
// killed or stopped at any instruction:
//
//   EMPTY ─► ASKED ─► TAKEN ─► DONE | FAULT ─► EMPTY of the next sequence
//              └──────────────────────────────► EMPTY of the next sequence (withdrawn)
//
// The mover makes EMPTY → ASKED and all changes to EMPTY, the client makes the others. The list is written before
// ASKED. Store: ASKED = gather these into your segment, DONE = the bytes are in staging. Retrieve: ASKED = the bytes
// are in staging, scatter them; DONE = they are in the KV blocks. One ring serves one registration and dies with it.
//
// An ask can want the sum of each stretch as well (base/digest.h), or nothing else. The sums are written before DONE.
//
// The mover trusts no word of the ring: an unexpected value is a FAULT, and an impossible sum is a wrong one. The
// client checks the lists.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/digest.h"
#include "base/shared_memory.h"
#include "gpu/staging/stretches.h"

namespace kv::gpu {

constexpr uint32_t LANES = 2;
constexpr uint32_t STORE_LANE = 0;
constexpr uint32_t RETRIEVE_LANE = 1;
// Segments of a lane: 128 MiB with the largest segments. Beside an engine whose kernels fill the GPU for 1.4 ms each,
// packing has its turn only that often, and the link copies 77 MiB meanwhile.
constexpr uint32_t SEGMENTS = 8;
constexpr uint64_t SEGMENT_BYTES_MAX = 16 << 20;
constexpr uint64_t SEGMENT_BYTES_MIN = 1 << 20;

// The offset of a segment in the staging memory; the same on both sides.
constexpr uint64_t segment_offset(uint32_t lane, uint32_t segment, uint64_t segment_bytes) {
    return (uint64_t{lane} * SEGMENTS + segment) * segment_bytes;
}

enum class SegmentState : uint8_t { EMPTY = 0, ASKED = 1, TAKEN = 2, DONE = 3, FAULT = 4 };

// The work of an ask. SUM: nothing is copied, and nothing lies in staging.
enum class SegmentWork : uint32_t { COPY = 0, COPY_AND_SUM = 1, SUM = 2 };

// Reasons of a client's FAULT.
constexpr uint32_t FAULT_LIST = 1;    // the list does not fit the registration
constexpr uint32_t FAULT_DRIVER = 2;  // the client's driver failed

struct RingHeader {
    uint64_t magic;
    uint64_t segment_bytes;
    std::atomic<uint32_t> bell;    // counts asks; the client sleeps on it
    std::atomic<uint32_t> asleep;  // 1: the next ask must wake it
};

struct alignas(64) SegmentCell {
    std::atomic<uint64_t> word;
    std::atomic<uint64_t> job;
    std::atomic<uint32_t> list_bytes;
    std::atomic<uint32_t> fault;
    std::atomic<SegmentWork> work;
};
static_assert(sizeof(SegmentCell) == 64);

// Size of a ring's memfd.
uint64_t ring_bytes();

// The mapped ring; both sides have one.
class RingMemory {
  public:
    RingMemory(int fd, const char* what) : mapping_(fd, ring_bytes(), what) {}
    RingHeader& header() const;
    SegmentCell& cell(uint32_t lane, uint32_t segment) const;
    std::byte* list(uint32_t lane, uint32_t segment) const;
    DigestSum* sums(uint32_t lane, uint32_t segment) const;  // STRETCHES_MAX
    const Mapping& mapping() const { return mapping_; }

  private:
    Mapping mapping_;
};

// The client's side: makes the ring. take, done, fault and sleep belong to one thread; the rest is thread-safe.
class RingOwner {
  public:
    // The memfd is sealed against shrinking and growing, and a forked child does not have the mapping.
    explicit RingOwner(uint64_t segment_bytes);

    int fd() const { return fd_.get(); }

    struct Asked {
        uint32_t lane;
        uint32_t segment;
        uint64_t sequence;
        uint64_t job;
        SegmentWork work;
        std::vector<std::byte> list;  // a copy; empty when its length or the work in the ring was impossible
    };
    // Takes the next ASKED segment of the lane, which becomes TAKEN; in the order of the segments.
    std::optional<Asked> take(uint32_t lane);
    // sums: of the stretches, if they were asked for.
    void done(uint32_t lane, uint32_t segment, uint64_t sequence, std::span<const DigestSum> sums);
    void fault(uint32_t lane, uint32_t segment, uint64_t sequence, uint32_t code);

    // Sleeps until a segment is ASKED, the bell rings, or the time is over.
    void sleep(int timeout_ms);
    // Ends a sleep.
    void ring_bell();

  private:
    bool anything_asked() const;

    Descriptor fd_;
    RingMemory memory_;
    uint32_t next_[LANES] = {};  // where take() looks first
};

// The mover's side. One thread per lane. It has its own sequences, so it never believes an old or made-up word.
class RingPeer {
  public:
    // Maps the client's ring; the descriptor stays the caller's. Refusal("staging") when it is no ring with this
    // segment size, or not sealed against shrinking.
    RingPeer(int fd, uint64_t segment_bytes);

    // EMPTY → ASKED, and rings the bell. False: not EMPTY. The caller has bounded the list to LIST_BYTES.
    bool ask(uint32_t lane, uint32_t segment, uint64_t job, SegmentWork work, std::span<const StagedStretch> stretches);
    SegmentState state(uint32_t lane, uint32_t segment) const;
    // The sums of the first `count` stretches of a segment that is DONE: any numbers that the client wrote.
    std::vector<DigestSum> sums(uint32_t lane, uint32_t segment, size_t count) const;
    // ASKED → EMPTY. False: the client has taken it, and DONE or FAULT will come.
    bool withdraw(uint32_t lane, uint32_t segment);
    // DONE or FAULT → EMPTY.
    void recycle(uint32_t lane, uint32_t segment);
    // The reason of the client's FAULT; 0 when its word was invalid.
    uint32_t fault(uint32_t lane, uint32_t segment) const;

  private:
    RingMemory memory_;
    uint64_t sequences_[LANES][SEGMENTS] = {};
};

}  // namespace kv::gpu
