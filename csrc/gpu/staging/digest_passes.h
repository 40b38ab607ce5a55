// The digest passes beside the copies of segments: the list of each, and the sums that kv_digest adds up.
//
// A pass reads the pages themselves: for a store the memory that a gather reads, for a retrieve what a scatter wrote.
// Its pieces are made from those of the copy, so that nothing is expanded twice.
//
// Used by one thread. All memory is taken by the constructor.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/digest.h"
#include "gpu/driver/handles.h"
#include "gpu/kernels/kernels.h"
#include "gpu/staging/stretches.h"

namespace kv::gpu {

class DigestPasses {
  public:
    // pieces_max, sums_max: of one segment. Refusal("device-memory").
    DigestPasses(const Driver& driver, uint32_t segments, uint32_t pieces_max, uint32_t sums_max);

    // Begins the list of a segment, whose pass before has ended.
    void begin(uint32_t segment);
    // The pieces after this belong to another sum.
    void begin_sum(uint32_t segment);
    // Adds the pieces that were expanded from a stretch. `staged`: device address of the segment, where the stretch's
    // bytes that are in none of its blocks are read instead; 0: they are left out. False: the list is full.
    bool add(uint32_t segment, const StagedStretch& stretch, std::span<const Piece> pieces, Address staged);
    // Enqueues the pass, and then the copy of its sums to the host.
    void launch(uint32_t segment, const Kernels& kernels, const DigestTables& tables, const Stream& stream);
    // After the pass has ended: its sums.
    std::vector<DigestSum> sums(uint32_t segment) const;

  private:
    struct Pass {
        uint32_t pieces = 0;
        uint32_t sums = 0;
        // The device's numbers before the pass. They are zeroed only once: a copy in front of each pass would wait for
        // its turn at the link. A copy to the host that did not happen shows as bytes that nobody summed.
        bool zeroed = false;
        std::vector<DigestShares> before;
    };

    std::span<DigestShares> shares_of(uint32_t segment) const;

    const uint32_t pieces_max_;
    const uint32_t sums_max_;
    const DeviceMemory shares_;
    const PinnedMemory seen_;  // the shares, as they were copied to the host
    const PinnedMemory lists_;
    std::vector<Pass> passes_;
};

}  // namespace kv::gpu
