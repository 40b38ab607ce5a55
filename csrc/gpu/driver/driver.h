// One vendor's driver behind neutral methods: found and opened at run time, no SDK at build time.
//
// A call that fails throws DriverError with the vendor's names of call and error. Only results that the caller decides
// upon (out of memory, not ready, "the driver does not say") are values. Thread-safe. Methods for memory, streams or
// modules need a current device in the calling thread: Current of handles.h.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpu/driver/symbols.h"

namespace kv::gpu {

enum class Vendor { CUDA, ROCM };

// "cuda" or "rocm": the device kind of the protocol.
const char* name_of(Vendor vendor);

// what(): "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)".
class DriverError : public std::runtime_error {
  public:
    DriverError(const std::string& call_, int code_, const std::string& code_name_);
    const std::string call;
    const int code;
    const std::string code_name;
};

// The driver cannot be used: no library, missing symbols (named), or no device.
class DriverAbsent : public std::runtime_error {
    using runtime_error::runtime_error;
};

struct Probe {
    Vendor vendor;
    std::string library;  // as it was opened; empty when none was found
    std::vector<std::string> missing_required;
    std::vector<std::string> missing_optional;
    int version = 0;
    int devices = 0;
    std::string problem;  // empty: usable
};

// Examines a vendor's library. Never throws. `library`: a path, or "" for a search (library.h).
Probe probe(Vendor vendor, const std::string& library);

// TO_HOST for a store, which gathers; TO_DEVICE for a retrieve, which scatters.
enum class Way { TO_HOST, TO_DEVICE };

struct BatchCopy {
    Address host;  // its device address, from host_address()
    Address device;
    uint64_t bytes;
};

class Driver {
  public:
    // The same arguments give the same object, which lives until the process ends. DriverAbsent.
    static const Driver& open(Vendor vendor, const std::string& library);

    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    Vendor vendor() const { return vendor_; }
    const std::string& library() const { return library_; }
    int version() const { return version_; }

    int devices() const;
    std::string device_name(int ordinal) const;
    std::array<std::byte, 16> device_uuid(int ordinal) const;
    std::string device_pci(int ordinal) const;  // lower case
    int multiprocessors(int ordinal) const;     // ROCm: 256, as it only bounds a grid
    std::string arch(int ordinal) const;        // "sm_90", "gfx942"; "" if unknown on ROCm

    // The calling thread uses that device until leave(), which takes the result of enter(). Contexts are the primary
    // ones, retained until the process ends.
    void* enter(int ordinal) const;
    void leave(void* before) const;
    // From now on this thread's calls do not invalidate a stream capture of another thread.
    void relax_capture_mode() const;

    struct Memory {
        uint64_t free_bytes;
        uint64_t total_bytes;
    };
    Memory memory() const;
    std::optional<Address> alloc(uint64_t bytes) const;  // nullopt: out of memory
    void free(Address memory) const;

    struct Range {
        Address base;
        uint64_t bytes;
    };
    Range address_range(Address memory) const;
    // nullopt: the driver does not say.
    std::optional<int> device_of(Address memory) const;
    std::optional<bool> ipc_capable(Address memory) const;

    IpcHandle ipc_get(Address base) const;
    Address ipc_open(const IpcHandle& handle) const;  // always with flag 1: HIP refuses any other
    void ipc_close(Address memory) const;

    // Pinned host memory, portable and mapped. Its device address comes from host_address() and may differ.
    void* host_alloc(uint64_t bytes) const;
    void host_free(void* memory) const;
    bool can_register() const;
    void host_register(void* memory, uint64_t bytes) const;
    void host_unregister(void* memory) const;
    Address host_address(void* memory) const;

    // `host`: pinned memory.
    void copy(Way way, void* host, Address device, uint64_t bytes, StreamPointer stream) const;
    // Enqueues all copies, in batch calls of at most 8192 if the driver has a batch call that works, else one by one.
    void copy_batch(Way way, std::span<const BatchCopy> copies, StreamPointer stream) const;
    bool has_batch() const { return batch_works_.load(std::memory_order_relaxed); }

    StreamPointer stream_create(bool high_priority) const;
    void stream_destroy(StreamPointer stream) const;
    void stream_wait(StreamPointer stream, EventPointer event) const;
    bool stream_done(StreamPointer stream) const;  // false: not ready
    EventPointer event_create() const;
    void event_destroy(EventPointer event) const;
    void event_record(EventPointer event, StreamPointer stream) const;
    bool event_done(EventPointer event) const;  // false: not ready

    ModulePointer module_load(const void* image) const;
    void module_unload(ModulePointer module) const;
    FunctionPointer module_function(ModulePointer module, const char* name) const;
    // Launches a one-dimensional grid without shared memory.
    void launch(FunctionPointer function, unsigned blocks, unsigned threads, StreamPointer stream,
                void** arguments) const;

  private:
    Driver(Probe probe, const Symbols& calls);

    bool cuda() const { return vendor_ == Vendor::CUDA; }
    int device(int ordinal) const;
    void* primary(int ordinal) const;
    bool enqueue_batch(Way way, std::span<const BatchCopy> copies, StreamPointer stream) const;
    void check(int code, const std::array<const char*, 2>& names) const;

    const Vendor vendor_;
    const std::string library_;
    const int version_;
    const Symbols calls_;
    mutable std::atomic<bool> batch_works_{false};
    mutable std::mutex contexts_lock_;
    mutable std::vector<void*> contexts_;  // CUDA: by ordinal, null until first used
};

}  // namespace kv::gpu
