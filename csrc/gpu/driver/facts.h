// What a device is, for people and for telling devices apart.

#pragma once

#include <cstdint>
#include <string>

#include "gpu/driver/driver.h"

namespace kv::gpu {

struct DeviceFacts {
    std::string id;  // 32 hex digits of the UUID, "@", PCI bus id: the same in every process, unlike the ordinal
    std::string name;
    std::string arch;
    std::string pci;
    int ordinal;
    uint64_t total_bytes;
};

std::string device_id(const Driver& driver, int ordinal);
DeviceFacts facts_of(const Driver& driver, int ordinal);

// -1: this process sees no such device.
int ordinal_of(const Driver& driver, const std::string& id);

// How this process makes and opens IPC handles: both sides must agree. CUDA: "". ROCm: "legacy" when
// HSA_ENABLE_IPC_MODE_LEGACY=1, else "dmabuf".
std::string ipc_mode(Vendor vendor);

// "gfx942" from the Linux driver's topology directory, by PCI bus id; "" when it does not say.
std::string kfd_arch(const std::string& topology, const std::string& pci);

}  // namespace kv::gpu
