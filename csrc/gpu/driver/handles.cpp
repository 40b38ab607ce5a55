#include "gpu/driver/handles.h"

namespace kv::gpu {

Current::~Current() {
    try {
        driver_.leave(before_);
    } catch (const DriverError&) {
        return;  // a destructor cannot throw; the next call of this thread will fail
    }
}

CurrentIfPossible::CurrentIfPossible(const Driver& driver, int ordinal) {
    try {
        current_.emplace(driver, ordinal);
    } catch (const DriverError&) {
        current_.reset();
    }
}

std::optional<DeviceMemory> DeviceMemory::take(const Driver& driver, uint64_t bytes) {
    const std::optional<Address> address = driver.alloc(bytes);
    if (!address) return std::nullopt;
    return DeviceMemory(driver, *address, bytes);
}

}  // namespace kv::gpu
