// Launches of kv_digest for segments: the list of each, and its sums. Where a segment is copied, that kernel copies it.
//
// Device memory has the numbers that the crews add to. The kernel leaves zeros there, and reports to the host.
//
// Used by one thread. All memory is taken by the constructor.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/digest.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/handles.h"
#include "gpu/kernels/kernels.h"
#include "gpu/staging/stretches.h"

namespace kv::gpu {

// The copies of a pass: TO_HOST gathers into the segment at that device address, TO_DEVICE scatters from it.
struct PassCopy {
    Way way;
    Address segment;
};

class DigestPasses {
  public:
    // pieces_max, sums_max: of one segment. Refusal("device-memory").
    DigestPasses(const Driver& driver, uint32_t segments, uint32_t pieces_max, uint32_t sums_max);

    // Begins the list of a segment, whose pass before has ended.
    void begin(uint32_t segment);
    // The pieces after this belong to another sum.
    void begin_sum(uint32_t segment);
    // Adds the pieces that were expanded from a stretch. With `copy` they are copied as well. A scatter also sums the
    // stretch's bytes that are in none of its blocks, in staging. False: the list is full.
    bool add(uint32_t segment, const StagedStretch& stretch, std::span<const Piece> pieces,
             const std::optional<PassCopy>& copy);
    // Enqueues the pass: one kernel.
    void launch(uint32_t segment, const Kernels& kernels, const DigestTables& tables, const Stream& stream);
    // After the pass has ended: its sums. One that this pass did not report has no bytes.
    std::vector<DigestSum> sums(uint32_t segment) const;

  private:
    struct Pass {
        uint32_t pieces = 0;
        uint32_t sums = 0;
        uint64_t launch = 0;  // counts them; what the memory has first is of none
    };

    const uint32_t pieces_max_;
    const uint32_t sums_max_;
    const DeviceMemory totals_;  // for each segment a counter, then shares
    const PinnedMemory reports_;
    const PinnedMemory lists_;
    std::vector<Pass> passes_;
};

}  // namespace kv::gpu
