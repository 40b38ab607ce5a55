// The kernels, loaded into one device: compiled for exactly this device by the vendor's run-time
// compiler, or else from the built-in objects. The report has the choice and the reason.

#pragma once

#include <cstdint>
#include <string>

#include "base/digest.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/handles.h"
#include "gpu/kernels/digest_tables.h"
#include "gpu/kernels/piece.h"

namespace kv::gpu {

struct KernelReport {
    std::string provider;  // "nvrtc 13.0", "hiprtc 7.2", "built-in ptx sm_90", "built-in bundle"
    std::string arch;      // of the device, "" when unknown
    std::string note;      // why the run-time compiler was not used, else ""
};

struct KernelOptions {
    std::string rtc_library;  // "" = search
    std::string cache_dir;    // "" = none
};

// The sum of these shares, which kv_digest added up.
DigestSum digest_sum(const DigestShares& shares);

// One per process and device. Launching is thread-safe.
class Kernels {
  public:
    // Loads them into the current device, which is `ordinal`. Refusal("kernels") when nothing could be loaded.
    Kernels(const Driver& driver, int ordinal, const KernelOptions& options);

    const KernelReport& report() const { return report_; }

    // Enqueues the copy of `count` pieces without sums: TO_HOST gathers from pool to staging, TO_DEVICE scatters.
    // `pieces`: device address of their list, which must stay until the copy ended.
    void launch(Way way, Address pieces, uint32_t count, Address segment, const Stream& stream) const;

    // Enqueues the sums of `count` pieces, perhaps of none, and their copies. Launches with the same totals must not
    // overlap, nor follow one that failed. The pieces' list must stay until the end.
    void digest(Address pieces, uint32_t count, const DigestTables& tables, DigestTotals totals,
                const Stream& stream) const;

  private:
    Module load(const KernelOptions& options);

    const Driver& driver_;
    unsigned multiprocessors_;
    KernelReport report_;
    Module module_;
    FunctionPointer gather_;
    FunctionPointer scatter_;
    FunctionPointer digest_;
};

}  // namespace kv::gpu
