// A device pointer of the engine → what another process needs to reach that memory.

#pragma once

#include <cstdint>

#include "gpu/driver/driver.h"

namespace kv::gpu {

struct Exported {
    Address base;      // of the allocation that holds the pointer
    uint64_t bytes;    // of the allocation
    IpcHandle handle;  // of the base: an importer gets the base, wherever the handle was made
};

// The ordinal of the device that the memory is on. Refusal("device") when the driver does not know it.
int device_holding(const Driver& driver, Address pointer);

// Refusal("range") when [pointer, pointer + bytes) is not inside one allocation, ("not-exportable") when the driver
// does not share this kind of memory.
Exported export_allocation(const Driver& driver, int ordinal, Address pointer, uint64_t bytes);

}  // namespace kv::gpu
