#include "gpu/staging/exporter.h"

#include <cinttypes>

#include "base/check.h"
#include "gpu/driver/facts.h"
#include "gpu/driver/handles.h"

namespace kv::gpu {
namespace {

[[noreturn]] void refuse_export(const Driver& driver, Address base, const std::string& why) {
    throw Refusal("not-exportable",
                  format("the %s driver does not share the memory at 0x%" PRIx64
                         " between processes (%s). KV caches must come from plain allocations: set %s="
                         "expandable_segments:False, and use neither managed memory nor an asynchronous memory pool",
                         name_of(driver.vendor()), base, why.c_str(),
                         driver.vendor() == Vendor::CUDA ? "PYTORCH_CUDA_ALLOC_CONF" : "PYTORCH_HIP_ALLOC_CONF"));
}

Driver::Range allocation_of(const Driver& driver, Address pointer) {
    try {
        return driver.address_range(pointer);
    } catch (const DriverError& error) {
        throw Refusal("range", format("0x%" PRIx64 " is in no allocation: %s", pointer, error.what()));
    }
}

int device_holding(const Driver& driver, Address pointer) {
    if (const std::optional<int> ordinal = driver.device_of(pointer)) return *ordinal;
    if (driver.devices() == 1) return 0;  // also on an old ROCm, which cannot tell
    throw Refusal("device",
                  format("the %s driver knows no device memory at 0x%" PRIx64, name_of(driver.vendor()), pointer));
}

}  // namespace

Exported export_memory(const Driver& driver, Address pointer, uint64_t bytes) {
    const int ordinal = device_holding(driver, pointer);
    const Current current(driver, ordinal);
    const Driver::Range range = allocation_of(driver, pointer);
    const uint64_t offset = pointer - range.base;
    if (pointer < range.base || offset > range.bytes || bytes > range.bytes - offset) {
        throw Refusal("range", format("%" PRIu64 " bytes at 0x%" PRIx64 " leave their allocation of %" PRIu64
                                      " bytes at 0x%" PRIx64,
                                      bytes, pointer, range.bytes, range.base));
    }
    if (driver.ipc_capable(range.base) == false) refuse_export(driver, range.base, "it says so");
    try {
        return {device_id(driver, ordinal), ordinal, range.base, range.bytes, driver.ipc_get(range.base)};
    } catch (const DriverError& error) {
        refuse_export(driver, range.base, error.what());
    }
}

}  // namespace kv::gpu
