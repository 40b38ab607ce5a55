#include "gpu/driver/handles.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/check.h"

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

void DeviceMemory::fill(std::span<const std::byte> bytes) const {
    KV_ASSERT(bytes.size() <= bytes_);
    const PinnedMemory source(driver(), bytes.size());
    std::ranges::copy(bytes, source.data());
    const Stream stream(driver(), /*high_priority=*/false);
    driver().copy(Way::TO_DEVICE, source.data(), address(), bytes.size(), stream.get());
    while (!driver().stream_done(stream.get())) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace kv::gpu
