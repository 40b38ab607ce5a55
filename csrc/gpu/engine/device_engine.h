// Copies between KV pools on one device and the arena: the counterpart of CopyEngine, with the same promises.
//
// Threads: one thread calls the methods (the mover's loop); a pump for each direction advances jobs; a house thread
// imports, registers the arena and unmaps, because the driver takes up to hundreds of milliseconds for that. No call
// waits for the device, except the constructor and close().
//
// Ends: every submitted job gives exactly one completion; every map_cache() exactly one, MAPPED or REFUSED; every
// unmap_cache() of a mapped cache exactly one, after the cache's last job. BROKEN: the driver failed on the data path;
// nothing more will complete, and the process has to end.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/completion_queue.h"
#include "base/shared_memory.h"
#include "copy/board.h"
#include "gpu/driver/facts.h"
#include "gpu/engine/device_job.h"
#include "gpu/engine/imports.h"
#include "gpu/engine/link.h"
#include "gpu/engine/measure.h"
#include "gpu/engine/pump.h"
#include "gpu/kernels/kernels.h"

namespace kv::gpu {

struct EngineOptions {
    Vendor vendor;
    std::string library;      // "" = search
    std::string device_id;    // facts.h
    std::string arena_reach;  // of make_link()
    KernelOptions kernels;
    int arena_fd;  // stays the caller's
    uint64_t arena_bytes;
    uint64_t slab_bytes;               // no slot crosses a multiple of this
    int threads;                       // copying threads if the arena cannot be registered
    uint64_t gather_segment_bytes;     // of our own staging, for caches without staging
    std::optional<Measured> measured;  // by an earlier run on this device and driver
};

struct DeviceBuffer {
    IpcHandle handle;
    uint64_t bytes;
};

struct StagingOrder {
    IpcHandle handle;
    uint64_t segment_bytes;
    int ring_fd;
};

struct CacheOrder {
    uint64_t cache;
    uint64_t session;
    std::vector<DeviceBuffer> buffers;
    std::optional<StagingOrder> staging;
    std::string ipc_mode;
    std::vector<Group> groups;
};

class DeviceEngine {
  public:
    // Refusal("device-unknown" | "kernels" | "arena-reach" | "device-memory"), DriverAbsent, DriverError.
    explicit DeviceEngine(EngineOptions options);
    ~DeviceEngine() { close(); }

    std::string backend() const;
    std::vector<std::pair<std::string, std::string>> facts() const;
    const Measured& measured() const { return measured_; }
    // The number of open allocations of other processes.
    size_t imports() const { return imports_open_; }
    int eventfd() const { return completions_.eventfd(); }

    // As in CopyEngine.
    void map_board(uint64_t session, int fd, uint32_t words);
    void drop_board(uint64_t session);

    // Duplicates the ring's descriptor and returns; the result comes as a completion.
    void map_cache(CacheOrder order);
    // A cache that is not mapped (any more) is not an error: it may have been refused meanwhile. One that is being
    // mapped ends as MAPPED and UNMAPPED, or as REFUSED.
    void unmap_cache(uint64_t cache);
    void submit(JobOrder order, JobMode allowed);
    void cancel(uint64_t job);
    // The first `slabs` slabs of the arena may be used by jobs.
    void arena_ready(uint64_t slabs);

    std::vector<Completion> completions(size_t most) { return completions_.take(most); }
    // Stops all jobs, waits for their ends, unmaps. completions() may still be called.
    void close();

    // The test of device_self_test.h with this engine's kernels and kind of link, independent of its jobs.
    std::string self_test() const;

  private:
    struct Entry {
        uint64_t session;
        std::shared_ptr<MappedDeviceCache> cache;  // null while it is being mapped
        uint64_t jobs = 0;
        bool leaving = false;
    };
    struct MapOrder {
        CacheOrder order;
        Descriptor ring;
    };
    using Lock = std::unique_lock<std::mutex>;

    void start_pumps();
    Lock lock_open();
    void keep_house();
    bool do_chore(Lock& lock);
    void map(MapOrder order, Lock& lock);
    void unmap(uint64_t cache, Lock& lock);
    std::shared_ptr<MappedDeviceCache> import(const MapOrder& order);
    void import_buffers(const CacheOrder& order, MappedDeviceCache& cache);
    void import_staging(const MapOrder& order, MappedDeviceCache& cache);
    void release(const MappedDeviceCache& cache);
    void ended(const DeviceJobPointer& job, Completion completion);
    void broken(const std::string& message);
    Pump& pump_of(JobKind kind) { return kind == JobKind::STORE ? *store_pump_ : *retrieve_pump_; }

    const EngineOptions options_;
    const Driver& driver_;
    const int ordinal_;
    const DeviceFacts device_;
    Mapping arena_;
    std::unique_ptr<Kernels> kernels_;
    std::unique_ptr<DigestMemory> tables_;
    std::unique_ptr<Link> link_;
    std::unique_ptr<Packer> gatherer_, scatterer_;  // with our kernels
    KernelReport kernel_report_;
    std::string arena_reach_;  // the link's name
    Measured measured_;
    std::optional<DeviceTools> store_tools_, retrieve_tools_;
    Imports imports_;  // the house thread's
    std::atomic<size_t> imports_open_{0};
    CompletionQueue<Completion> completions_;

    std::mutex mutex_;  // guards everything below
    std::condition_variable chore_ready_;
    Boards boards_;
    std::unordered_map<uint64_t, Entry> caches_;
    std::unordered_map<uint64_t, DeviceJobPointer> jobs_;
    std::deque<MapOrder> to_map_;
    std::deque<uint64_t> to_unmap_;
    bool looked_at_arena_ = false;  // since arena_ready()
    bool closing_ = false;
    bool broken_ = false;

    std::unique_ptr<Pump> store_pump_, retrieve_pump_;
    std::thread housekeeper_;
};

}  // namespace kv::gpu
