// Memory of other processes, opened by IPC handle: once for each handle, however many caches use it.

#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "gpu/driver/driver.h"

namespace kv::gpu {

// Not thread-safe: used by the house thread only. The device must be current.
class Imports {
  public:
    Imports(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
    ~Imports();

    // The base address of the allocation, which must have at least `bytes`. `what` names it in refusals. Close it as
    // often as it was opened. Refusal("handle" | "handle-size" | "handle-device" | "handle-pid") and DriverError leave
    // nothing open.
    Address open(const IpcHandle& handle, uint64_t bytes, const std::string& what);
    void close(const IpcHandle& handle);
    size_t open_count() const { return entries_.size(); }

  private:
    struct Entry {
        Address base;
        uint64_t bytes;
        uint64_t uses;
    };
    Address import(const IpcHandle& handle, const std::string& what) const;
    void check(const Entry& entry, uint64_t bytes, const std::string& what) const;

    const Driver& driver_;
    const int ordinal_;
    std::unordered_map<std::string, Entry> entries_;  // by the handle's bytes
};

}  // namespace kv::gpu
