#include "gpu/engine/packer.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <deque>
#include <utility>

#include "base/check.h"
#include "gpu/kernels/piece.h"
#include "gpu/staging/digest_passes.h"
#include "gpu/staging/expand.h"
#include "gpu/staging/stretches.h"

namespace kv::gpu {
namespace {

// ------------------------------------------------------------------ by the client

class RingPacker : public Packer {
  public:
    RingPacker(RingPeer& ring, uint32_t lane, Address staging, uint64_t segment_bytes)
        : ring_(ring), lane_(lane), staging_(staging), segment_bytes_(segment_bytes) {}

    SegmentLimits limits() const override { return {segment_bytes_, PIECES_MAX, LIST_BYTES, STRETCHES_MAX}; }
    Address segment_address(uint32_t segment) const override {
        return staging_ + segment_offset(lane_, segment, segment_bytes_);
    }
    const Event* packed(uint32_t) const override { return nullptr; }

    std::optional<uint32_t> claim() override {
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

    void begin(uint32_t segment, uint64_t job, SegmentWork work, const Pool&,
               const std::vector<StagedStretch>& stretches) override {
        KV_ASSERT(uses_[segment] == Use::CLAIMED);
        uses_[segment] = ring_.ask(lane_, segment, job, work, stretches) ? Use::ASKED : Use::SPOILT;
        stretches_[segment] = stretches.size();
    }

    std::vector<DigestSum> sums(uint32_t segment) override { return ring_.sums(lane_, segment, stretches_[segment]); }

    PackState poll(uint32_t segment) override {
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

    void recycle(uint32_t segment) override {
        if (uses_[segment] != Use::CLAIMED) ring_.recycle(lane_, segment);
        uses_[segment] = Use::FREE;
    }

    bool let_go(uint32_t segment) override {
        if (uses_[segment] == Use::ASKED && ring_.withdraw(lane_, segment)) {
            uses_[segment] = Use::FREE;
        } else if (poll(segment) != PackState::WAITING) {
            recycle(segment);
        } else {
            uses_[segment] = Use::LEFT;
        }
        return true;
    }

  private:
    // SPOILT: the client wrote a word that belongs to us. LEFT: the client has the segment, and no job waits for it.
    enum class Use { FREE, CLAIMED, ASKED, SPOILT, LEFT };

    // Frees segments that the client has finished for jobs that are gone.
    void collect() {
        for (uint32_t segment = 0; segment < SEGMENTS; ++segment) {
            if (uses_[segment] == Use::LEFT && poll(segment) != PackState::WAITING) recycle(segment);
        }
    }

    RingPeer& ring_;
    const uint32_t lane_;
    const Address staging_;
    const uint64_t segment_bytes_;
    std::array<Use, SEGMENTS> uses_{};
    std::array<size_t, SEGMENTS> stretches_{};  // that were asked for last
    uint32_t next_ = 0;
};

// ------------------------------------------------------------------ by our kernels

constexpr uint32_t KERNEL_SEGMENTS = 2;
constexpr uint64_t SEGMENT_BYTES_LEAST = 16 << 20;  // halving stops here
constexpr uint64_t MEAN_PIECE_BYTES = 256;          // smaller pieces fill a segment's list before its bytes
constexpr uint32_t PARTS_MAX = 16384;               // of one segment

class KernelPacker : public Packer {
  public:
    KernelPacker(const Driver& driver, const Kernels& kernels, const DigestMemory& tables, Way way,
                 uint64_t segment_bytes)
        : driver_(driver),
          kernels_(kernels),
          tables_(tables),
          way_(way),
          segment_bytes_(segment_bytes),
          stream_(driver, /*high_priority=*/way == Way::TO_DEVICE) {}

    void prepare(SegmentWork work) override {
        if (work != SegmentWork::SUM && !memory_) take_staging();
        while (segments_.size() < KERNEL_SEGMENTS) segments_.emplace_back(driver_, pieces_max());
        if (work != SegmentWork::COPY && !passes_) {
            passes_.emplace(driver_, KERNEL_SEGMENTS, static_cast<uint32_t>(pieces_max()), PARTS_MAX);
        }
    }

    // Less than pieces_max(), because a piece may be cut in two when a stretch is expanded in parts.
    SegmentLimits limits() const override { return {segment_bytes_, pieces_max() / 8 * 7, UINT64_MAX, PARTS_MAX}; }
    Address segment_address(uint32_t segment) const override { return memory_->address() + segment * segment_bytes_; }
    const Event* packed(uint32_t segment) const override { return &segments_[segment].ended; }

    std::optional<uint32_t> claim() override {
        const uint32_t segment = next_;
        if (segments_[segment].claimed) return std::nullopt;
        segments_[segment].claimed = true;
        next_ = (segment + 1) % KERNEL_SEGMENTS;
        return segment;
    }

    void begin(uint32_t segment, uint64_t, SegmentWork work, const Pool& pool,
               const std::vector<StagedStretch>& stretches) override {
        Segment& target = segments_[segment];
        KV_ASSERT(target.claimed && !target.begun);
        listed_ = 0;
        if (work != SegmentWork::COPY) passes_->begin(segment);
        for (const StagedStretch& stretch : stretches) {
            if (work != SegmentWork::COPY) passes_->begin_sum(segment);
            add(stretch, pool, work, segment);
        }
        if (work == SegmentWork::COPY) {
            kernels_.launch(way_, target.pieces.address(), listed_, segment_address(segment), stream_);
        } else {
            passes_->launch(segment, kernels_, tables_.get(), stream_);
        }
        target.ended.record(stream_);
        target.begun = true;
    }

    PackState poll(uint32_t segment) override {
        return segments_[segment].ended.done() ? PackState::DONE : PackState::WAITING;
    }

    std::vector<DigestSum> sums(uint32_t segment) override { return passes_->sums(segment); }

    void recycle(uint32_t segment) override { segments_[segment].claimed = segments_[segment].begun = false; }

    bool let_go(uint32_t segment) override {
        if (poll(segment) == PackState::WAITING) return false;
        recycle(segment);
        return true;
    }

  private:
    struct Segment {
        Segment(const Driver& driver, uint64_t pieces_max)
            : pieces(driver, pieces_max * sizeof(Piece)), ended(driver) {}
        PinnedMemory pieces;
        Event ended;
        bool claimed = false;
        bool begun = false;
    };

    uint64_t pieces_max() const { return std::max<uint64_t>(PIECES_MAX, segment_bytes_ / MEAN_PIECE_BYTES); }

    void take_staging() {
        const uint64_t wanted = segment_bytes_;
        while (!(memory_ = DeviceMemory::take(driver_, KERNEL_SEGMENTS * segment_bytes_))) {
            if (segment_bytes_ / 2 < SEGMENT_BYTES_LEAST) {
                segment_bytes_ = wanted;
                throw Refusal("device-memory", format("no %" PRIu64 " bytes of device memory are left for staging",
                                                      KERNEL_SEGMENTS * SEGMENT_BYTES_LEAST));
            }
            segment_bytes_ /= 2;
        }
    }

    // Lists the pieces of a stretch, expanded in as many parts as necessary. The lists are launched once, although
    // parts could begin sooner: each launch may have to wait for its turn beside the engine's kernels.
    void add(const StagedStretch& stretch, const Pool& pool, SegmentWork work, uint32_t segment) {
        const auto& [shard, staging, begin, end] = stretch;
        pieces_.clear();
        if (!expand(pool.layout, shard, begin, end, staging, pool.bases, pieces_)) {
            const uint64_t middle = begin + (end - begin) / 2;
            add({shard, staging, begin, middle}, pool, work, segment);
            add({shard, staging + static_cast<uint32_t>(middle - begin), middle, end}, pool, work, segment);
            return;
        }
        if (work == SegmentWork::COPY) return list(segments_[segment]);
        std::optional<PassCopy> copy;
        if (work == SegmentWork::COPY_AND_SUM) copy = {way_, segment_address(segment)};
        const bool listed = passes_->add(segment, stretch, pieces_, copy);
        KV_ASSERT(listed);
    }

    void list(Segment& target) {
        KV_ASSERT(listed_ + pieces_.size() <= pieces_max());
        std::ranges::copy(std::as_bytes(std::span(pieces_)), target.pieces.data() + listed_ * sizeof(Piece));
        listed_ += static_cast<uint32_t>(pieces_.size());
    }

    const Driver& driver_;
    const Kernels& kernels_;
    const DigestMemory& tables_;
    const Way way_;
    uint64_t segment_bytes_;
    Stream stream_;
    std::optional<DeviceMemory> memory_;
    std::deque<Segment> segments_;
    std::optional<DigestPasses> passes_;
    uint32_t next_ = 0;
    std::vector<Piece> pieces_;  // of the part that begin() expands
    uint32_t listed_ = 0;        // pieces of the segment that begin() fills, where it only copies
};

}  // namespace

std::unique_ptr<Packer> make_ring_packer(RingPeer& ring, uint32_t lane, Address staging, uint64_t segment_bytes) {
    return std::make_unique<RingPacker>(ring, lane, staging, segment_bytes);
}

std::unique_ptr<Packer> make_kernel_packer(const Driver& driver, const Kernels& kernels, const DigestMemory& tables,
                                           Way way, uint64_t segment_bytes) {
    return std::make_unique<KernelPacker>(driver, kernels, tables, way, segment_bytes);
}

}  // namespace kv::gpu
