// The client's side of a staged transfer: gathers KV pages into staging, and scatters them, as the ring asks.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy/layout.h"
#include "gpu/driver/driver.h"
#include "gpu/kernels/kernels.h"
#include "gpu/staging/ring.h"

namespace kv::gpu {

struct CopierOptions {
    int ordinal;
    uint64_t segment_bytes;  // smaller if the device has not enough memory; see segment_bytes()
    uint64_t shard_bytes;    // of the longest shard in any registration's layout
    KernelOptions kernels;
};

// Owns the staging memory, streams of high priority and one thread, which sleeps while no segment is asked for.
// Everything that a driver may refuse during a stream capture (memory, modules, handles) is done by the constructor, in
// the caller's thread. Thread-safe.
//
// One ring at a time, one for each registration; the staging memory is the same for all of them.
class StagedCopier {
  public:
    // Refusal("staging-memory") when there is no room for segments of SEGMENT_BYTES_MIN, ("device-memory") when there
    // is none for digests, ("kernels") when no kernel can be loaded; DriverError.
    StagedCopier(const Driver& driver, const CopierOptions& options);
    // Waits for running kernels, joins the thread, frees the staging memory: no process may have it mapped any more.
    // Does nothing in a forked child, which has neither thread nor device.
    ~StagedCopier();

    IpcHandle handle() const;  // of the staging memory
    uint64_t segment_bytes() const;
    const KernelReport& kernels() const;

    // Makes a ring for a registration with this layout; bases[i] = device address of buffer i. Returns the ring's
    // descriptor, which stays ours. bad_argument unless quiet(), or if a shard is longer than CopierOptions say.
    int begin_ring(Layout layout, std::vector<Address> bases);
    // Stops taking segments from the ring. Segments that were taken go on until quiet().
    void end_ring();

    // Whether there is no ring, and no kernel of an earlier one runs.
    bool quiet() const;
    // A mark of everything that the lane has taken so far, and whether all of that has ended. After a job's word has
    // ended, no segment of that job is taken any more. So when a mark made then has passed, nobody touches its blocks.
    uint64_t mark(uint32_t lane) const;
    bool passed(uint32_t lane, uint64_t mark) const;

    // Readable when quiet() or broken() may have changed; read it to reset.
    int eventfd() const;
    // The driver's error that ended all work here; empty while all is well.
    std::string broken() const;

  private:
    struct Work;
    std::unique_ptr<Work> work_;
};

}  // namespace kv::gpu
