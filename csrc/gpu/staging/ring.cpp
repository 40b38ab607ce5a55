#include "gpu/staging/ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <climits>
#include <ctime>

#include "base/check.h"

namespace kv::gpu {
namespace {

constexpr uint64_t MAGIC = 0x3230474e4952564b;  // "KVRING02"
constexpr uint64_t HEADER_BYTES = 4096;
constexpr uint64_t CELLS = LANES * SEGMENTS;
constexpr uint64_t LISTS_OFFSET = HEADER_BYTES + CELLS * sizeof(SegmentCell);
constexpr uint64_t SUMS_OFFSET = LISTS_OFFSET + CELLS * LIST_BYTES;
constexpr uint64_t SUMS_BYTES = STRETCHES_MAX * sizeof(DigestSum);  // of one segment
constexpr uint64_t PAGE_BYTES = 4096;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "a lock inside shared memory would die with its owner");
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel waits on this word");
static_assert(sizeof(RingHeader) <= HEADER_BYTES && LISTS_OFFSET % 8 == 0 && LIST_BYTES % 8 == 0);
static_assert(sizeof(std::atomic<SegmentWork>) == sizeof(SegmentWork));

constexpr uint64_t pack(uint64_t sequence, SegmentState state) { return sequence << 8 | static_cast<uint64_t>(state); }

bool swap(SegmentCell& cell, uint64_t sequence, SegmentState from, uint64_t to) {
    uint64_t expected = pack(sequence, from);
    return cell.word.compare_exchange_strong(expected, to);
}

// Waits on the ring's futex; a shared one, since two processes use it. An early return does no harm.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void wake(RingHeader& header) { futex(header.bell, FUTEX_WAKE, INT_MAX, nullptr); }

Descriptor create_ring() { return create_memfd("kvserver-ring", ring_bytes(), /*huge_page_bytes=*/0, /*sealed=*/true); }

int checked_ring(int fd) {
    const int seals = file_seals(fd);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || seals & F_SEAL_WRITE) {
        throw Refusal("staging", "the ring must be shared memory, sealed against shrinking and not against writing");
    }
    if (file_bytes(fd) < ring_bytes()) {
        throw Refusal("staging",
                      format("the ring has %" PRIu64 " bytes, expected %" PRIu64, file_bytes(fd), ring_bytes()));
    }
    return fd;
}

}  // namespace

uint64_t ring_bytes() { return (SUMS_OFFSET + CELLS * SUMS_BYTES + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

RingHeader& RingMemory::header() const { return *reinterpret_cast<RingHeader*>(mapping_.data()); }

SegmentCell& RingMemory::cell(uint32_t lane, uint32_t segment) const {
    KV_ASSERT(lane < LANES && segment < SEGMENTS);
    return reinterpret_cast<SegmentCell*>(mapping_.data() + HEADER_BYTES)[lane * SEGMENTS + segment];
}

std::byte* RingMemory::list(uint32_t lane, uint32_t segment) const {
    KV_ASSERT(lane < LANES && segment < SEGMENTS);
    return mapping_.data() + LISTS_OFFSET + (lane * SEGMENTS + segment) * LIST_BYTES;
}

DigestSum* RingMemory::sums(uint32_t lane, uint32_t segment) const {
    KV_ASSERT(lane < LANES && segment < SEGMENTS);
    return reinterpret_cast<DigestSum*>(mapping_.data() + SUMS_OFFSET + (lane * SEGMENTS + segment) * SUMS_BYTES);
}

// ---------------------------------------------------------------- client

RingOwner::RingOwner(uint64_t segment_bytes) : fd_(create_ring()), memory_(fd_.get(), "the staging ring") {
    if (::madvise(memory_.mapping().data(), memory_.mapping().bytes(), MADV_DONTFORK) != 0) {
        throw_errno("madvise of the staging ring");
    }
    memory_.header().segment_bytes = segment_bytes;
    memory_.header().magic = MAGIC;
}

std::optional<RingOwner::Asked> RingOwner::take(uint32_t lane) {
    for (uint32_t step = 0; step < SEGMENTS; ++step) {
        const uint32_t segment = (next_[lane] + step) % SEGMENTS;
        SegmentCell& cell = memory_.cell(lane, segment);
        const uint64_t word = cell.word.load();
        const uint64_t sequence = word >> 8;
        if (word != pack(sequence, SegmentState::ASKED)) continue;
        if (!swap(cell, sequence, SegmentState::ASKED, pack(sequence, SegmentState::TAKEN))) continue;  // withdrawn
        next_[lane] = (segment + 1) % SEGMENTS;
        Asked asked{lane, segment, sequence, cell.job.load(), cell.work.load(), {}};
        const uint32_t bytes = cell.list_bytes.load();
        if (bytes <= LIST_BYTES && asked.work <= SegmentWork::SUM) {
            const std::byte* const list = memory_.list(lane, segment);
            asked.list.assign(list, list + bytes);
        }
        return asked;
    }
    return std::nullopt;
}

void RingOwner::done(uint32_t lane, uint32_t segment, uint64_t sequence, std::span<const DigestSum> sums) {
    KV_ASSERT(sums.size() <= STRETCHES_MAX);
    std::ranges::copy(sums, memory_.sums(lane, segment));
    swap(memory_.cell(lane, segment), sequence, SegmentState::TAKEN, pack(sequence, SegmentState::DONE));
}

void RingOwner::fault(uint32_t lane, uint32_t segment, uint64_t sequence, uint32_t code) {
    SegmentCell& cell = memory_.cell(lane, segment);
    cell.fault.store(code);
    swap(cell, sequence, SegmentState::TAKEN, pack(sequence, SegmentState::FAULT));
}

void RingOwner::sleep(int timeout_ms) {
    RingHeader& header = memory_.header();
    const uint32_t heard = header.bell.load();
    header.asleep.store(1);
    // A mover that asks now either sees that we are asleep, or has asked before we check.
    if (!anything_asked()) {
        const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
        futex(header.bell, FUTEX_WAIT, heard, &timeout);
    }
    header.asleep.store(0);
}

void RingOwner::ring_bell() {
    memory_.header().bell.fetch_add(1);
    wake(memory_.header());
}

bool RingOwner::anything_asked() const {
    for (uint32_t index = 0; index < CELLS; ++index) {
        const uint64_t word = memory_.cell(index / SEGMENTS, index % SEGMENTS).word.load();
        if (static_cast<SegmentState>(word & 0xff) == SegmentState::ASKED) return true;
    }
    return false;
}

// ---------------------------------------------------------------- mover

RingPeer::RingPeer(int fd, uint64_t segment_bytes) : memory_(checked_ring(fd), "the staging ring") {
    const RingHeader& header = memory_.header();
    if (header.magic != MAGIC || header.segment_bytes != segment_bytes) {
        throw Refusal("staging", format("the ring says segments of %" PRIu64 " bytes, the registration %" PRIu64,
                                        header.magic == MAGIC ? header.segment_bytes : 0, segment_bytes));
    }
}

bool RingPeer::ask(uint32_t lane, uint32_t segment, uint64_t job, SegmentWork work,
                   std::span<const StagedStretch> stretches) {
    SegmentCell& cell = memory_.cell(lane, segment);
    const uint64_t sequence = sequences_[lane][segment];
    if (cell.word.load() != pack(sequence, SegmentState::EMPTY)) return false;
    cell.job.store(job);
    cell.list_bytes.store(pack_stretches(stretches, {memory_.list(lane, segment), LIST_BYTES}));
    cell.fault.store(0);
    cell.work.store(work);
    if (work != SegmentWork::COPY) {
        // A client that writes no sums shall not end with those of a segment before.
        std::fill_n(memory_.sums(lane, segment), stretches.size(), DigestSum{NO_DIGEST, 0});
    }
    if (!swap(cell, sequence, SegmentState::EMPTY, pack(sequence, SegmentState::ASKED))) return false;
    RingHeader& header = memory_.header();
    header.bell.fetch_add(1);
    if (header.asleep.load() != 0) wake(header);
    return true;
}

SegmentState RingPeer::state(uint32_t lane, uint32_t segment) const {
    const uint64_t word = memory_.cell(lane, segment).word.load();
    const auto state = static_cast<SegmentState>(word & 0xff);
    const bool known = word >> 8 == sequences_[lane][segment] && state <= SegmentState::FAULT;
    return known ? state : SegmentState::FAULT;
}

std::vector<DigestSum> RingPeer::sums(uint32_t lane, uint32_t segment, size_t count) const {
    KV_ASSERT(count <= STRETCHES_MAX);
    const DigestSum* const sums = memory_.sums(lane, segment);
    return {sums, sums + count};
}

bool RingPeer::withdraw(uint32_t lane, uint32_t segment) {
    uint64_t& sequence = sequences_[lane][segment];
    if (!swap(memory_.cell(lane, segment), sequence, SegmentState::ASKED, pack(sequence + 1, SegmentState::EMPTY))) {
        return false;
    }
    ++sequence;
    return true;
}

void RingPeer::recycle(uint32_t lane, uint32_t segment) {
    // Whatever the word's value: a client that changes its words breaks only its own transfers.
    memory_.cell(lane, segment).word.store(pack(++sequences_[lane][segment], SegmentState::EMPTY));
}

uint32_t RingPeer::fault(uint32_t lane, uint32_t segment) const { return memory_.cell(lane, segment).fault.load(); }

}  // namespace kv::gpu
