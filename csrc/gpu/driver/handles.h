// Owners of driver objects. Each is used and destroyed by threads in which its device is current (Current).
//
// Destructors ignore a driver's errors: after a sticky error every call fails, and the process is about to end.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "gpu/driver/driver.h"

namespace kv::gpu {

// While it lives, the calling thread uses that device; afterwards the one before.
class Current {
  public:
    Current(const Driver& driver, int ordinal) : driver_(driver), before_(driver.enter(ordinal)) {}
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

  private:
    const Driver& driver_;
    void* before_;
};

// Like Current, but never fails, for releasing objects. After a sticky error no device can be made current, and each
// owner below ignores the error that it gets.
class CurrentIfPossible {
  public:
    CurrentIfPossible(const Driver& driver, int ordinal);

  private:
    std::optional<Current> current_;
};

// A driver's object and the call that releases it.
template <typename Object, void (Driver::*give_back)(Object) const>
class Owned {
  public:
    Owned() = default;
    Owned(const Driver& driver, Object object) : driver_(&driver), object_(object) {}
    Owned(Owned&& other) noexcept : driver_(std::exchange(other.driver_, nullptr)), object_(other.object_) {}
    Owned& operator=(Owned&& other) noexcept {
        std::swap(driver_, other.driver_);
        std::swap(object_, other.object_);
        return *this;
    }
    ~Owned() {
        if (!driver_) return;
        try {
            (driver_->*give_back)(object_);
        } catch (const DriverError&) {
            driver_ = nullptr;  // see the head of this file
        }
    }
    const Driver& driver() const { return *driver_; }
    Object get() const { return object_; }

  private:
    const Driver* driver_ = nullptr;
    Object object_{};
};

struct Stream : Owned<StreamPointer, &Driver::stream_destroy> {
    Stream(const Driver& driver, bool high_priority) : Owned(driver, driver.stream_create(high_priority)) {}
};

struct Event : Owned<EventPointer, &Driver::event_destroy> {
    explicit Event(const Driver& driver) : Owned(driver, driver.event_create()) {}
    void record(const Stream& stream) { driver().event_record(get(), stream.get()); }
    bool done() const { return driver().event_done(get()); }
};

class DeviceMemory : public Owned<Address, &Driver::free> {
  public:
    // nullopt: out of memory.
    static std::optional<DeviceMemory> take(const Driver& driver, uint64_t bytes);
    Address address() const { return get(); }
    uint64_t bytes() const { return bytes_; }
    // Waits until its first bytes are these.
    void fill(std::span<const std::byte> bytes) const;

  private:
    DeviceMemory(const Driver& driver, Address address, uint64_t bytes) : Owned(driver, address), bytes_(bytes) {}
    uint64_t bytes_;
};

// Host memory for DMA, which kernels of the device can also read and write in place.
class PinnedMemory : public Owned<void*, &Driver::host_free> {
  public:
    PinnedMemory(const Driver& driver, uint64_t bytes)
        : Owned(driver, driver.host_alloc(bytes)), address_(driver.host_address(get())), bytes_(bytes) {}
    std::byte* data() const { return static_cast<std::byte*>(get()); }
    Address address() const { return address_; }
    uint64_t bytes() const { return bytes_; }

  private:
    Address address_;
    uint64_t bytes_;
};

struct Module : Owned<ModulePointer, &Driver::module_unload> {
    Module(const Driver& driver, const void* image) : Owned(driver, driver.module_load(image)) {}
    FunctionPointer function(const char* name) const { return driver().module_function(get(), name); }
};

}  // namespace kv::gpu
