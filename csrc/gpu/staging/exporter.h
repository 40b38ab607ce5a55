// Export of an engine's device memory, so that another process can reach it.

#pragma once

#include <cstdint>
#include <string>

#include "gpu/driver/driver.h"

namespace kv::gpu {

struct Exported {
    std::string device;  // facts.h
    int ordinal;
    Address base;      // of the allocation that holds the pointer
    uint64_t bytes;    // of the allocation
    IpcHandle handle;  // of the base: an importer always gets the base, whatever pointer the handle was made for
};

// Refusal("device") when the driver does not know the memory's device, ("range") when [pointer, pointer + bytes) is not
// inside one allocation, ("not-exportable") when the driver does not share this kind of memory.
Exported export_memory(const Driver& driver, Address pointer, uint64_t bytes);

}  // namespace kv::gpu
