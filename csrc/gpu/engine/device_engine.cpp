#include "gpu/engine/device_engine.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>

#include "base/check.h"
#include "base/threads.h"
#include "gpu/engine/device_self_test.h"
#include "gpu/staging/stretches.h"

namespace kv::gpu {
namespace {

constexpr uint64_t BOUNCE_BYTES = 16 << 20;

// While the driver registers memory, all other calls of this process wait: about 10 ms for this size. A thread that
// registers pieces without a pause never lets them in: the first store into an arena of 40 GiB ended only after all of
// it was registered, 7 s later. So pieces are small, those that nobody has asked for wait until no job is under way,
// and there is a pause (BREATH) between the others.
constexpr uint64_t UNIT_BYTES_MAX = 64 << 20;
constexpr uint64_t HUGE_PAGE_BYTES = 2 << 20;
constexpr std::chrono::milliseconds BREATH{1};

// Bytes of a slab that are registered at a time.
uint64_t unit_of(uint64_t slab_bytes) {
    uint64_t unit = slab_bytes;
    while (unit > UNIT_BYTES_MAX && unit % (2 * HUGE_PAGE_BYTES) == 0) unit /= 2;
    return unit;
}

int known_ordinal(const Driver& driver, const std::string& id) {
    const int ordinal = ordinal_of(driver, id);
    if (ordinal < 0) {
        throw Refusal("device-unknown", format("device %s is none of the %d that %s shows to this process", id.c_str(),
                                               driver.devices(), driver.library().c_str()));
    }
    return ordinal;
}

std::string show_bytes(uint64_t bytes) {
    if (bytes == UINT64_MAX) return "never";
    return bytes >= 1 << 20 ? format("%" PRIu64 " MiB", bytes >> 20) : format("%" PRIu64 " KiB", bytes >> 10);
}

}  // namespace

DeviceEngine::DeviceEngine(EngineOptions options)
    : options_(std::move(options)),
      driver_(Driver::open(options_.vendor, options_.library)),
      ordinal_(known_ordinal(driver_, options_.device_id)),
      device_(facts_of(driver_, ordinal_)),
      imports_(driver_, ordinal_) {
    if (options_.slab_bytes == 0 || options_.arena_bytes % options_.slab_bytes != 0) {
        bad_argument(
            format("arena_bytes=%" PRIu64 " must be slabs of %" PRIu64, options_.arena_bytes, options_.slab_bytes));
    }
    if (options_.threads < 1) bad_argument(format("threads=%d must be at least 1", options_.threads));
    const Current current(driver_, ordinal_);
    kernels_ = std::make_unique<Kernels>(driver_, ordinal_, options_.kernels);
    tables_ = std::make_unique<DigestMemory>(driver_);
    arena_ = map_arena(options_.arena_fd, options_.arena_bytes);
    const LinkOptions link{unit_of(options_.slab_bytes), BOUNCE_BYTES, options_.threads};
    link_ = make_link(driver_, options_.arena_reach, arena_, link);
    kernel_report_ = kernels_->report();
    arena_reach_ = link_->name();
    measured_ = options_.measured ? *options_.measured : measure(driver_);
    start_pumps();
    housekeeper_ = start_thread("kv-house", [this] { keep_house(); });
}

void DeviceEngine::start_pumps() {
    const uint64_t segment_bytes = options_.gather_segment_bytes;
    gatherer_ = make_kernel_packer(driver_, *kernels_, *tables_, Way::TO_HOST, segment_bytes);
    scatterer_ = make_kernel_packer(driver_, *kernels_, *tables_, Way::TO_DEVICE, segment_bytes);
    store_tools_.emplace(DeviceTools{*link_, *gatherer_, arena_, measured_.store.direct_from});
    retrieve_tools_.emplace(DeviceTools{*link_, *scatterer_, arena_, measured_.retrieve.direct_from});
    const PumpEvents events{[this](const DeviceJobPointer& job, Completion end) { ended(job, std::move(end)); },
                            [this](const std::string& message) { broken(message); }};
    store_pump_ = std::make_unique<Pump>("kv-pump-out", driver_, ordinal_, events);
    retrieve_pump_ = std::make_unique<Pump>("kv-pump-in", driver_, ordinal_, events);
}

std::string DeviceEngine::backend() const {
    const auto& [store, retrieve] = measured_;
    const uint64_t staged = std::max(store.direct_from.staged_bytes, retrieve.direct_from.staged_bytes);
    const uint64_t bare = std::max(store.direct_from.bare_bytes, retrieve.direct_from.bare_bytes);
    const std::string arch = device_.arch.empty() ? "unknown" : device_.arch;
    return format("%s %s, %s, arena by %s, direct from %s, without staging from %s", gpu::name_of(driver_.vendor()),
                  arch.c_str(), kernel_report_.provider.c_str(), arena_reach_.c_str(), show_bytes(staged).c_str(),
                  show_bytes(bare).c_str());
}

std::vector<std::pair<std::string, std::string>> DeviceEngine::facts() const {
    const auto& [store, retrieve] = measured_;
    return {{"device", device_.name},
            {"device-id", device_.id},
            {"device-memory", std::to_string(device_.total_bytes)},
            {"arch", device_.arch},
            {"library", driver_.library()},
            {"driver", std::to_string(driver_.version())},
            {"kernels", kernel_report_.provider},
            {"kernels-note", kernel_report_.note},
            {"arena-reach", arena_reach_},
            {"batch", driver_.has_batch() ? "yes" : "one by one"},
            {"link-store-gbps", format("%.1f", store.gbps)},
            {"link-retrieve-gbps", format("%.1f", retrieve.gbps)},
            {"direct-from-store", show_bytes(store.direct_from.staged_bytes)},
            {"direct-from-retrieve", show_bytes(retrieve.direct_from.staged_bytes)},
            {"bare-direct-from-store", show_bytes(store.direct_from.bare_bytes)},
            {"bare-direct-from-retrieve", show_bytes(retrieve.direct_from.bare_bytes)}};
}

std::string DeviceEngine::self_test() const {
    const Current current(driver_, ordinal_);
    return gpu::self_test(driver_, *kernels_, options_.arena_reach);
}

// ------------------------------------------------------------------ the caller's side

DeviceEngine::Lock DeviceEngine::lock_open() {
    Lock lock(mutex_);
    if (closing_) bad_argument("the engine is closed");
    return lock;
}

void DeviceEngine::map_board(uint64_t session, int fd, uint32_t words) {
    const Lock lock = lock_open();
    boards_.map(session, fd, words);
}

void DeviceEngine::drop_board(uint64_t session) {
    const Lock lock = lock_open();
    const auto of_session = [&](const auto& entry) { return entry.second.session == session; };
    if (std::any_of(caches_.begin(), caches_.end(), of_session)) {
        bad_argument(format("session %" PRIu64 " still has mapped caches", session));
    }
    boards_.drop(session);
}

void DeviceEngine::map_cache(CacheOrder order) {
    Descriptor ring = order.staging ? duplicate(order.staging->ring_fd, "a ring") : Descriptor();
    {
        const Lock lock = lock_open();
        boards_.of(order.session);  // throws unless it has one
        if (!caches_.emplace(order.cache, Entry{order.session, nullptr}).second) {
            bad_argument(format("cache %" PRIu64 " is mapped already", order.cache));
        }
        to_map_.push_back({std::move(order), std::move(ring)});
    }
    chore_ready_.notify_one();
}

void DeviceEngine::unmap_cache(uint64_t cache) {
    {
        const Lock lock = lock_open();
        const auto found = caches_.find(cache);
        if (found == caches_.end() || found->second.leaving) return;
        found->second.leaving = true;
        if (found->second.cache != nullptr && found->second.jobs == 0) to_unmap_.push_back(cache);
    }
    chore_ready_.notify_one();
}

void DeviceEngine::submit(JobOrder order, JobMode allowed) {
    DeviceJobPointer job;
    {
        const Lock lock = lock_open();
        const auto found = caches_.find(order.cache);
        if (found == caches_.end() || found->second.leaving || found->second.cache == nullptr) {
            bad_argument(format("cache %" PRIu64 " is not mapped", order.cache));
        }
        Entry& entry = found->second;
        if (allowed == JobMode::STAGED && entry.cache->ring == nullptr) {
            bad_argument(format("cache %" PRIu64 " has no staging", order.cache));
        }
        const std::shared_ptr<Board>& board = boards_.of(entry.session);
        board->read(order.word);  // throws unless the board has it
        if (jobs_.contains(order.job)) bad_argument(format("job %" PRIu64 " is under way already", order.job));
        const DeviceTools& tools = order.kind == JobKind::STORE ? *store_tools_ : *retrieve_tools_;
        job = std::make_shared<DeviceJob>(std::move(order), allowed, entry.cache, board, tools);
        jobs_.emplace(job->id(), job);
        ++entry.jobs;
    }
    pump_of(job->kind()).add(job);
}

void DeviceEngine::cancel(uint64_t job) {
    const Lock lock = lock_open();
    const auto found = jobs_.find(job);
    if (found == jobs_.end()) return;
    found->second->stop();
    pump_of(found->second->kind()).wake();
}

void DeviceEngine::arena_ready(uint64_t slabs) {
    {
        const Lock lock = lock_open();
        link_->arena_ready(slabs * options_.slab_bytes);
        looked_at_arena_ = false;
    }
    chore_ready_.notify_one();
}

void DeviceEngine::close() {
    {
        const Lock lock(mutex_);
        if (closing_) return;
        closing_ = true;
        for (const auto& [id, job] : jobs_) job->stop();
    }
    const CurrentIfPossible current(driver_, ordinal_);
    store_pump_.reset();
    retrieve_pump_.reset();
    chore_ready_.notify_one();
    housekeeper_.join();
    KV_ASSERT(jobs_.empty() || broken_);
    jobs_.clear();
    caches_.clear();
    boards_ = {};
    gatherer_.reset();
    scatterer_.reset();
    link_.reset();
    tables_.reset();
    kernels_.reset();
    arena_.unmap();
}

// ------------------------------------------------------------------ the pumps' side

void DeviceEngine::ended(const DeviceJobPointer& job, Completion completion) {
    {
        const Lock lock(mutex_);
        const size_t ended = jobs_.erase(job->id());
        KV_ASSERT(ended == 1);
        Entry& entry = caches_.at(job->cache_id());
        KV_ASSERT(entry.jobs > 0);
        --entry.jobs;
        completions_.push(std::move(completion));
        if (!entry.leaving || entry.jobs > 0) return;
        to_unmap_.push_back(job->cache_id());
    }
    chore_ready_.notify_one();
}

void DeviceEngine::broken(const std::string& message) {
    const Lock lock(mutex_);
    broken_ = true;
    completions_.push({0, Status::BROKEN, 0, 0, "device", message});
}

// ------------------------------------------------------------------ the house thread

void DeviceEngine::keep_house() {
    try {
        const Current current(driver_, ordinal_);
        Lock lock(mutex_);
        while (!closing_) {
            if (do_chore(lock)) continue;
            looked_at_arena_ = true;
            const bool busy = !jobs_.empty();
            lock.unlock();
            const Prepared prepared = link_->prepare(/*wanted_only=*/busy);
            lock.lock();
            const auto called = [this] {
                return closing_ || !looked_at_arena_ || !to_map_.empty() || !to_unmap_.empty();
            };
            if (prepared == Prepared::ALL) {
                chore_ready_.wait(lock, called);
            } else if (busy) {
                chore_ready_.wait_for(lock, BREATH, called);
            }
        }
    } catch (const DriverError& error) {
        broken(error.what());
    }
}

bool DeviceEngine::do_chore(Lock& lock) {
    if (!to_unmap_.empty()) {
        const uint64_t cache = to_unmap_.front();
        to_unmap_.pop_front();
        unmap(cache, lock);
        return true;
    }
    if (!to_map_.empty()) {
        MapOrder order = std::move(to_map_.front());
        to_map_.pop_front();
        map(std::move(order), lock);
        return true;
    }
    return false;
}

void DeviceEngine::map(MapOrder order, Lock& lock) {
    const uint64_t cache = order.order.cache;
    Completion completion{cache, Status::MAPPED};
    std::shared_ptr<MappedDeviceCache> mapped;
    lock.unlock();
    try {
        mapped = import(order);
    } catch (const Refusal& refusal) {
        completion = {cache, Status::REFUSED, 0, 0, refusal.code, refusal.message};
    } catch (const DriverError& error) {
        completion = {cache, Status::REFUSED, 0, 0, "handle", error.what()};
    } catch (const std::system_error& error) {
        completion = {cache, Status::REFUSED, 0, 0, "descriptor", error.what()};
    }
    imports_open_ = imports_.open_count();
    lock.lock();
    completions_.push(std::move(completion));
    if (mapped == nullptr) {
        caches_.erase(cache);
        return;
    }
    Entry& entry = caches_.at(cache);
    entry.cache = std::move(mapped);
    if (entry.leaving) to_unmap_.push_back(cache);
}

std::shared_ptr<MappedDeviceCache> DeviceEngine::import(const MapOrder& order) {
    const std::string ours = ipc_mode(options_.vendor);
    if (order.order.ipc_mode != ours) {
        throw Refusal("ipc-mode", "handles made in IPC mode \"" + order.order.ipc_mode +
                                      "\" cannot be opened in mode \"" + ours +
                                      "\": set HSA_ENABLE_IPC_MODE_LEGACY for client and server alike");
    }
    std::vector<uint64_t> sizes;
    for (const DeviceBuffer& buffer : order.order.buffers) sizes.push_back(buffer.bytes);
    const auto cache =
        std::make_shared<MappedDeviceCache>(MappedDeviceCache{order.order.session, Layout(order.order.groups, sizes)});
    for (const Group& group : cache->layout.groups()) {
        prepare_digest(group.shard_bytes);
        tables_->reach(group.shard_bytes);
    }
    try {
        import_buffers(order.order, *cache);
        if (order.order.staging) import_staging(order, *cache);
    } catch (...) {
        release(*cache);
        throw;
    }
    return cache;
}

void DeviceEngine::import_buffers(const CacheOrder& order, MappedDeviceCache& cache) {
    for (size_t i = 0; i < order.buffers.size(); ++i) {
        const DeviceBuffer& buffer = order.buffers[i];
        cache.bases.push_back(imports_.open(buffer.handle, buffer.bytes, format("buffer %zu", i)));
        cache.handles.push_back(buffer.handle);
    }
}

void DeviceEngine::import_staging(const MapOrder& order, MappedDeviceCache& cache) {
    const StagingOrder& staging = *order.order.staging;
    const uint64_t segment_bytes = staging.segment_bytes;
    if (segment_bytes < SEGMENT_BYTES_MIN || segment_bytes > SEGMENT_BYTES_MAX || segment_bytes % SLOT_ALIGN != 0) {
        throw Refusal("staging", format("segment_bytes=%" PRIu64 " must be pages in [%" PRIu64 ", %" PRIu64 "]",
                                        segment_bytes, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX));
    }
    for (const Group& group : cache.layout.groups()) {
        if (stretch_list_bytes(group.blocks_per_chunk) > LIST_BYTES) {
            throw Refusal("staging",
                          format("chunks of %" PRIu64 " blocks are too long for staging", group.blocks_per_chunk));
        }
    }
    cache.ring = std::make_unique<RingPeer>(order.ring.get(), segment_bytes);
    const Address base = imports_.open(staging.handle, LANES * SEGMENTS * segment_bytes, "the staging memory");
    cache.handles.push_back(staging.handle);
    cache.gatherer = make_ring_packer(*cache.ring, STORE_LANE, base, segment_bytes);
    cache.scatterer = make_ring_packer(*cache.ring, RETRIEVE_LANE, base, segment_bytes);
}

void DeviceEngine::release(const MappedDeviceCache& cache) {
    for (const IpcHandle& handle : cache.handles) imports_.close(handle);
}

void DeviceEngine::unmap(uint64_t cache, Lock& lock) {
    const auto found = caches_.find(cache);
    KV_ASSERT(found != caches_.end());
    const std::shared_ptr<MappedDeviceCache> leaver = found->second.cache;
    KV_ASSERT(found->second.jobs == 0);
    caches_.erase(found);
    lock.unlock();
    release(*leaver);
    imports_open_ = imports_.open_count();
    lock.lock();
    completions_.push({cache, Status::UNMAPPED});
}

}  // namespace kv::gpu
