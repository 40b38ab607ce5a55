// Facts about a device, for people and for identification.

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
    uint64_t total_bytes;
};

std::string device_id(const Driver& driver, int ordinal);
DeviceFacts facts_of(const Driver& driver, int ordinal);

// The ordinal of a device; -1 if this process sees no such device.
int ordinal_of(const Driver& driver, const std::string& id);

// The kind of IPC handles that this process makes and opens; both sides must have the same. CUDA: "". ROCm: "legacy"
// when HSA_ENABLE_IPC_MODE_LEGACY=1, else "dmabuf".
std::string ipc_mode(Vendor vendor);

// The architecture, such as "gfx942", from the Linux driver's topology directory, by PCI bus id; "" if unknown.
std::string kfd_arch(const std::string& topology, const std::string& pci);

}  // namespace kv::gpu
