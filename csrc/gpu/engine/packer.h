// Gathering and scattering between a KV pool and segments of staging, by the client or by ourselves.
//
// A packer serves one direction and belongs to its pump's thread. A segment goes: claimed → (store) begin … DONE → link
// → recycled, or claimed → link → (retrieve) begin … DONE → recycled.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gpu/driver/handles.h"
#include "gpu/engine/shards.h"
#include "gpu/kernels/kernels.h"
#include "gpu/staging/ring.h"

namespace kv::gpu {

enum class PackState { WAITING, DONE, FAULT };

// The memory of a cache: its layout, and the addresses of the registered buffers by index.
struct Pool {
    const Layout& layout;
    std::span<const Address> bases;
};

class Packer {
  public:
    virtual ~Packer() = default;
    // Makes the packer ready for such work, which takes long the first time. Refusal("device-memory").
    virtual void prepare(SegmentWork) {}
    virtual SegmentLimits limits() const = 0;
    virtual Address segment_address(uint32_t segment) const = 0;
    // Claims the next free segment for the caller.
    virtual std::optional<uint32_t> claim() = 0;
    // Packs a claimed segment, or sums its bytes in the pool. Pool and block ids need to live during the call only.
    virtual void begin(uint32_t segment, uint64_t job, SegmentWork work, const Pool& pool,
                       const std::vector<StagedStretch>& stretches) = 0;
    virtual PackState poll(uint32_t segment) = 0;
    // An event that a DMA can wait for on the device instead of poll(); null if there is none.
    virtual const Event* packed(uint32_t segment) const = 0;
    // The sum of each stretch of a segment that is DONE and was to be summed. A client's may be any numbers.
    virtual std::vector<DigestSum> sums(uint32_t segment) = 0;
    // Frees a claimed segment that is DONE, FAULT or was never begun.
    virtual void recycle(uint32_t segment) = 0;
    // Gives up a segment that was begun. True: this process does not touch it any more, and it is no longer the
    // caller's. False: ask again.
    virtual bool let_go(uint32_t segment) = 0;
};

// Packing by the client of a staged cache, over its ring, which must outlive the packer. Segments that the client began
// and does not end stay unused. `staging`: device address of the whole staging memory.
std::unique_ptr<Packer> make_ring_packer(RingPeer& ring, uint32_t lane, Address staging, uint64_t segment_bytes);

// Packing with our own staging and kernels, for caches without staging. The kernels of two processes take turns on a
// GPU, of milliseconds each. So segments are large, and each is one launch, to have few turns to wait for.
//
// prepare() allocates the staging memory, with smaller segments if there is not enough, but not below 16 MiB. None is
// needed for SUM. Jobs with digests begin when the tables reach their shards.
std::unique_ptr<Packer> make_kernel_packer(const Driver& driver, const Kernels& kernels, const DigestMemory& tables,
                                           Way way, uint64_t segment_bytes);

}  // namespace kv::gpu
