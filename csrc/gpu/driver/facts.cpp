#include "gpu/driver/facts.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "base/check.h"
#include "base/words.h"
#include "gpu/driver/handles.h"

namespace kv::gpu {

std::string device_id(const Driver& driver, int ordinal) {
    std::string id;
    for (const std::byte byte : driver.device_uuid(ordinal)) id += format("%02x", std::to_integer<unsigned>(byte));
    return id + "@" + driver.device_pci(ordinal);
}

DeviceFacts facts_of(const Driver& driver, int ordinal) {
    const Current current(driver, ordinal);
    return {device_id(driver, ordinal), driver.device_name(ordinal), driver.arch(ordinal), driver.device_pci(ordinal),
            driver.memory().total_bytes};
}

int ordinal_of(const Driver& driver, const std::string& id) {
    const int devices = driver.devices();
    for (int ordinal = 0; ordinal < devices; ++ordinal) {
        if (device_id(driver, ordinal) == id) return ordinal;
    }
    return -1;
}

std::string ipc_mode(Vendor vendor) {
    if (vendor == Vendor::CUDA) return "";
    const char* legacy = std::getenv("HSA_ENABLE_IPC_MODE_LEGACY");
    return legacy && std::string(legacy) == "1" ? "legacy" : "dmabuf";
}

// A node's `properties` has a line "name number" each; gfx_target_version 90402 is gfx942: a decimal digit pair each
// of major, minor and stepping, of which the name shows the last as a hexadecimal digit (90010 is gfx90a).
std::string kfd_arch(const std::string& topology, const std::string& pci) {
    std::error_code missing;
    for (const auto& node : std::filesystem::directory_iterator(topology, missing)) {
        Words properties(content_of(node.path() / "properties"));
        uint64_t value = 0, version = 0, domain = 0, location = 0;
        for (std::string_view name = properties.next(); properties.next(value); name = properties.next()) {
            if (name == "gfx_target_version") version = value;
            if (name == "domain") domain = value;
            if (name == "location_id") location = value;
        }
        const std::string address = format("%04" PRIx64 ":%02" PRIx64 ":%02" PRIx64 ".%" PRIx64, domain,
                                           location >> 8 & 0xff, location >> 3 & 0x1f, location & 7);
        if (version == 0 || address != pci) continue;
        return format("gfx%" PRIu64 "%" PRIx64 "%" PRIx64, version / 10000, version / 100 % 100, version % 100);
    }
    return "";
}

}  // namespace kv::gpu
