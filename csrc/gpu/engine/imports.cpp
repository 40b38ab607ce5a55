#include "gpu/engine/imports.h"

#include <cinttypes>

#include "base/check.h"

namespace kv::gpu {
namespace {

std::string key_of(const IpcHandle& handle) {
    return {reinterpret_cast<const char*>(handle.bytes), sizeof handle.bytes};
}

}  // namespace

Imports::~Imports() {
    for (const auto& [key, entry] : entries_) {
        try {
            driver_.ipc_close(entry.base);
        } catch (const DriverError&) {
            return;  // in a broken context every call fails, and the process ends
        }
    }
}

Address Imports::open(const IpcHandle& handle, uint64_t bytes, const std::string& what) {
    const std::string key = key_of(handle);
    auto found = entries_.find(key);
    if (found == entries_.end()) {
        const Address base = import(handle, what);
        try {
            const Entry entry{base, driver_.address_range(base).bytes, 0};
            check(entry, bytes, what);
            found = entries_.emplace(key, entry).first;
        } catch (...) {
            driver_.ipc_close(base);
            throw;
        }
    } else {
        check(found->second, bytes, what);
    }
    ++found->second.uses;
    return found->second.base;
}

void Imports::close(const IpcHandle& handle) {
    const auto found = entries_.find(key_of(handle));
    KV_ASSERT(found != entries_.end());
    if (--found->second.uses > 0) return;
    const Address base = found->second.base;
    entries_.erase(found);
    driver_.ipc_close(base);
}

Address Imports::import(const IpcHandle& handle, const std::string& what) const {
    try {
        return driver_.ipc_open(handle);
    } catch (const DriverError& error) {
        if (error.code == INVALID_CONTEXT) {
            // Both vendors return this for a handle of the own process, recognized by its PID. In two PID namespaces,
            // two processes may have the same.
            throw Refusal("handle-pid", what + ": the driver takes client and mover for one process; in containers, " +
                                            "start both with --pid=host (" + error.what() + ")");
        }
        throw Refusal("handle", what +
                                    " cannot be opened here: is it freed, or of another machine or kind of memory? (" +
                                    error.what() + ")");
    }
}

void Imports::check(const Entry& entry, uint64_t bytes, const std::string& what) const {
    if (entry.bytes < bytes) {
        throw Refusal("handle-size", format("%s needs %" PRIu64 " bytes, its allocation has %" PRIu64, what.c_str(),
                                            bytes, entry.bytes));
    }
    const std::optional<int> ordinal = driver_.device_of(entry.base);
    if (ordinal && *ordinal != ordinal_) {
        throw Refusal("handle-device", format("%s is memory of another device than the one registered", what.c_str()));
    }
}

}  // namespace kv::gpu
