// Gathering and scattering between a KV pool and segments of staging, by the client or by ourselves.
//
// A packer serves one direction and belongs to its pump's thread. A segment goes: claimed → (store) begin … DONE → link
// → recycled, or claimed → link → (retrieve) begin … DONE → recycled.

#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "gpu/driver/handles.h"
#include "gpu/engine/shards.h"
#include "gpu/kernels/kernels.h"
#include "gpu/staging/expand.h"
#include "gpu/staging/ring.h"

namespace kv::gpu {

enum class PackState { WAITING, DONE, FAULT };

class Packer {
  public:
    virtual ~Packer() = default;
    virtual SegmentLimits limits() const = 0;
    virtual Address segment_address(uint32_t segment) const = 0;
    // Claims the next free segment for the caller.
    virtual std::optional<uint32_t> claim() = 0;
    // Packs a claimed segment. The stretches' block ids need to live during the call only.
    virtual void begin(uint32_t segment, uint64_t job, const std::vector<StagedStretch>& stretches) = 0;
    virtual PackState poll(uint32_t segment) = 0;
    // An event that a DMA can wait for on the device instead of poll(); null if there is none.
    virtual const Event* packed(uint32_t segment) const = 0;
    // Frees a claimed segment that is DONE, FAULT or was never begun.
    virtual void recycle(uint32_t segment) = 0;
    // Gives up a segment that was begun. True: this process does not touch it any more, and it is no longer the
    // caller's. False: ask again.
    virtual bool let_go(uint32_t segment) = 0;
};

// Packing by the client of a staged cache, over its ring. Segments that the client began and does not end stay unused.
class RingPacker : public Packer {
  public:
    // `ring` must outlive it. `staging`: device address of the whole staging memory.
    RingPacker(RingPeer& ring, uint32_t lane, Address staging, uint64_t segment_bytes);
    SegmentLimits limits() const override;
    Address segment_address(uint32_t segment) const override;
    std::optional<uint32_t> claim() override;
    void begin(uint32_t segment, uint64_t job, const std::vector<StagedStretch>& stretches) override;
    PackState poll(uint32_t segment) override;
    const Event* packed(uint32_t) const override { return nullptr; }
    void recycle(uint32_t segment) override;
    bool let_go(uint32_t segment) override;

  private:
    // SPOILT: the client wrote a word that belongs to us. LEFT: the client has the segment, and no job waits for it.
    enum class Use { FREE, CLAIMED, ASKED, SPOILT, LEFT };
    void collect();

    RingPeer& ring_;
    const uint32_t lane_;
    const Address staging_;
    const uint64_t segment_bytes_;
    std::array<Use, SEGMENTS> uses_{};
    uint32_t next_ = 0;
};

// The memory of a job's cache: its layout, and the addresses of the registered buffers by index.
struct Pool {
    const Layout& layout;
    std::vector<Address> bases;
};

// Packing with our own staging and kernels, for caches without staging. The kernels of two processes take turns on a
// GPU, of milliseconds each. So segments are large, and each is one launch, to have few turns to wait for.
class KernelPacker {
  public:
    static constexpr uint32_t SEGMENTS_OF_LANE = 2;

    // Allocates no memory yet. `way`: GATHER for stores, SCATTER for retrieves.
    KernelPacker(const Driver& driver, const Kernels& kernels, Kernels::Way way, uint64_t segment_bytes);

    // Allocates the staging memory once, halved while there is not enough. Refusal("device-memory") below 16 MiB.
    void prepare();
    uint64_t segment_bytes() const { return segment_bytes_; }

    // The packer for one job. Call prepare() before.
    std::unique_ptr<Packer> serve(const Pool& pool);

  private:
    friend class KernelService;
    struct Segment {
        Segment(const Driver& driver, uint64_t pieces_max, Address address_)
            : address(address_), pieces(driver, pieces_max * sizeof(Piece)), event(driver) {}
        Address address;
        PinnedMemory pieces;
        Event event;
        bool claimed = false;
        bool begun = false;
    };
    uint64_t pieces_max() const;

    const Driver& driver_;
    const Kernels& kernels_;
    const Kernels::Way way_;
    uint64_t segment_bytes_;
    Stream stream_;
    std::optional<DeviceMemory> memory_;
    std::deque<Segment> segments_;
    uint32_t next_ = 0;
};

}  // namespace kv::gpu
