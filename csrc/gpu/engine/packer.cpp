#include "gpu/engine/packer.h"

#include <algorithm>
#include <cinttypes>
#include <span>
#include <utility>

#include "base/check.h"
#include "gpu/kernels/piece.h"
#include "gpu/staging/stretches.h"

namespace kv::gpu {

// ------------------------------------------------------------------ RingPacker

RingPacker::RingPacker(RingPeer& ring, uint32_t lane, Address staging, uint64_t segment_bytes)
    : ring_(ring), lane_(lane), staging_(staging), segment_bytes_(segment_bytes) {}

SegmentLimits RingPacker::limits() const { return {segment_bytes_, PIECES_MAX, LIST_BYTES}; }

Address RingPacker::segment_address(uint32_t segment) const {
    return staging_ + segment_offset(lane_, segment, segment_bytes_);
}

std::optional<uint32_t> RingPacker::claim() {
    collect();
    for (uint32_t step = 0; step < SEGMENTS; ++step) {
        const uint32_t segment = (next_ + step) % SEGMENTS;
        if (uses_[segment] != Use::FREE) continue;
        uses_[segment] = Use::CLAIMED;
        next_ = (segment + 1) % SEGMENTS;
        return segment;
    }
    return std::nullopt;
}

// Frees segments that the client has finished for jobs that are gone.
void RingPacker::collect() {
    for (uint32_t segment = 0; segment < SEGMENTS; ++segment) {
        if (uses_[segment] == Use::LEFT && poll(segment) != PackState::WAITING) {
            ring_.recycle(lane_, segment);
            uses_[segment] = Use::FREE;
        }
    }
}

void RingPacker::begin(uint32_t segment, uint64_t job, const std::vector<StagedStretch>& stretches) {
    KV_ASSERT(uses_[segment] == Use::CLAIMED);
    uses_[segment] = ring_.ask(lane_, segment, job, stretches) ? Use::ASKED : Use::SPOILT;
}

PackState RingPacker::poll(uint32_t segment) {
    if (uses_[segment] == Use::SPOILT) return PackState::FAULT;
    switch (ring_.state(lane_, segment)) {
        case SegmentState::ASKED:
        case SegmentState::TAKEN:
            return PackState::WAITING;
        case SegmentState::DONE:
            return PackState::DONE;
        case SegmentState::EMPTY:
        case SegmentState::FAULT:
            return PackState::FAULT;
    }
    return PackState::FAULT;
}

void RingPacker::recycle(uint32_t segment) {
    if (uses_[segment] != Use::CLAIMED) ring_.recycle(lane_, segment);
    uses_[segment] = Use::FREE;
}

bool RingPacker::let_go(uint32_t segment) {
    if (uses_[segment] == Use::ASKED && ring_.withdraw(lane_, segment)) {
        uses_[segment] = Use::FREE;
    } else if (poll(segment) != PackState::WAITING) {
        recycle(segment);
    } else {
        uses_[segment] = Use::LEFT;
    }
    return true;
}

// ------------------------------------------------------------------ KernelPacker

namespace {

constexpr uint64_t SEGMENT_BYTES_LEAST = 16 << 20;  // halving stops here
constexpr uint64_t MEAN_PIECE_BYTES = 256;          // smaller pieces fill a segment's list before its bytes

}  // namespace

// The packer of one job. The KernelPacker owns the segments.
class KernelService : public Packer {
  public:
    KernelService(KernelPacker& packer, Pool pool) : packer_(packer), pool_(std::move(pool)) {}

    // Less than pieces_max(), because a piece may be cut in two when a stretch is expanded in parts.
    SegmentLimits limits() const override { return {packer_.segment_bytes_, packer_.pieces_max() / 8 * 7, UINT64_MAX}; }
    Address segment_address(uint32_t segment) const override { return packer_.segments_[segment].address; }

    std::optional<uint32_t> claim() override {
        const uint32_t segment = packer_.next_;
        if (packer_.segments_[segment].claimed) return std::nullopt;
        packer_.segments_[segment].claimed = true;
        packer_.next_ = (segment + 1) % KernelPacker::SEGMENTS_OF_LANE;
        return segment;
    }

    void begin(uint32_t segment, uint64_t, const std::vector<StagedStretch>& stretches) override {
        KernelPacker::Segment& target = packer_.segments_[segment];
        KV_ASSERT(target.claimed && !target.begun);
        listed_ = 0;
        for (const StagedStretch& stretch : stretches) add(stretch, target);
        list(target);
        packer_.kernels_.launch(packer_.way_, target.pieces.address(), listed_, target.address, packer_.stream_);
        target.event.record(packer_.stream_);
        target.begun = true;
    }

    PackState poll(uint32_t segment) override {
        return packer_.segments_[segment].event.done() ? PackState::DONE : PackState::WAITING;
    }
    const Event* packed(uint32_t segment) const override { return &packer_.segments_[segment].event; }

    void recycle(uint32_t segment) override {
        packer_.segments_[segment].claimed = false;
        packer_.segments_[segment].begun = false;
    }

    bool let_go(uint32_t segment) override {
        if (poll(segment) == PackState::WAITING) return false;
        recycle(segment);
        return true;
    }

  private:
    // Lists the pieces of a stretch, expanded in as many parts as necessary.
    void add(const StagedStretch& stretch, KernelPacker::Segment& target) {
        const auto& [shard, staging, begin, end] = stretch;
        if (expand(pool_.layout, shard, begin, end, staging, pool_.bases, pieces_)) return;
        if (!pieces_.empty()) {
            list(target);
            add(stretch, target);
            return;
        }
        const uint64_t middle = begin + (end - begin) / 2;
        add({shard, staging, begin, middle}, target);
        add({shard, staging + static_cast<uint32_t>(middle - begin), middle, end}, target);
    }

    // Appends pieces to the segment's list. The list is launched once, although parts could begin sooner: each launch
    // may have to wait for its turn beside the engine's kernels.
    void list(KernelPacker::Segment& target) {
        KV_ASSERT(listed_ + pieces_.size() <= packer_.pieces_max());
        std::ranges::copy(std::as_bytes(std::span(pieces_)), target.pieces.data() + listed_ * sizeof(Piece));
        listed_ += static_cast<uint32_t>(pieces_.size());
        pieces_.clear();
    }

    KernelPacker& packer_;
    const Pool pool_;
    std::vector<Piece> pieces_;
    uint32_t listed_ = 0;  // pieces of the segment that begin() fills
};

KernelPacker::KernelPacker(const Driver& driver, const Kernels& kernels, Kernels::Way way, uint64_t segment_bytes)
    : driver_(driver),
      kernels_(kernels),
      way_(way),
      segment_bytes_(segment_bytes),
      stream_(driver, /*high_priority=*/way == Kernels::Way::SCATTER) {}

uint64_t KernelPacker::pieces_max() const { return std::max<uint64_t>(PIECES_MAX, segment_bytes_ / MEAN_PIECE_BYTES); }

void KernelPacker::prepare() {
    if (memory_) return;
    const uint64_t wanted = segment_bytes_;
    while (!(memory_ = DeviceMemory::take(driver_, SEGMENTS_OF_LANE * segment_bytes_))) {
        if (segment_bytes_ / 2 < SEGMENT_BYTES_LEAST) {
            segment_bytes_ = wanted;
            throw Refusal("device-memory", format("no %" PRIu64 " bytes of device memory are left for staging",
                                                  SEGMENTS_OF_LANE * SEGMENT_BYTES_LEAST));
        }
        segment_bytes_ /= 2;
    }
    for (uint32_t i = 0; i < SEGMENTS_OF_LANE; ++i) {
        segments_.emplace_back(driver_, pieces_max(), memory_->address() + i * segment_bytes_);
    }
}

std::unique_ptr<Packer> KernelPacker::serve(const Pool& pool) {
    KV_ASSERT(memory_.has_value());
    return std::make_unique<KernelService>(*this, pool);
}

}  // namespace kv::gpu
