#include "copy/copy_engine.h"

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "base/sigbus.h"
#include "copy/copy_kernels.h"

namespace kv {
namespace {

constexpr int THREADS_MAX = 256;

// Interval at which the housekeeper checks whether the arena has grown.
constexpr std::chrono::milliseconds GROWTH_POLL{50};

// Refuses a file that cannot be mapped for writing, or that is shorter than the layout assumes.
void check_descriptor(size_t index, int fd, uint64_t buffer_bytes) {
    const int seals = file_seals(fd);
    if (seals < 0) throw Refusal("descriptor-seal", format("buffer %zu is not a shared-memory file", index));
    if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
        throw Refusal("descriptor-seal", format("buffer %zu is sealed against writing", index));
    }
    if ((::fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) {
        throw Refusal("descriptor-seal", format("buffer %zu is not open for reading and writing", index));
    }
    const uint64_t present = file_bytes(fd);
    if (present < buffer_bytes) {
        throw Refusal("descriptor-size", format("buffer %zu needs %" PRIu64 " bytes, its file has %" PRIu64, index,
                                                buffer_bytes, present));
    }
}

size_t checked_threads(int threads) {
    check_range("threads", threads, 1, THREADS_MAX);
    return static_cast<size_t>(threads);
}

}  // namespace

CopyEngine::CopyEngine(int arena_fd, uint64_t arena_bytes, int threads)
    : threads_(threads),
      arena_(map_arena(arena_fd, arena_bytes)),
      spread_(checked_threads(threads)),
      workers_([this] { stop(); }),
      housekeeper_([this] { stop(); }) {
    install_sigbus_guard();
    prefaults_.push_back({nullptr, Prefault(arena_fd, arena_.data(), arena_.bytes(), true)});
    for (size_t i = 0; i < static_cast<size_t>(threads); ++i) {
        workers_.start(format("kv-copy-%zu", i), [this, i] { work(i); });
    }
    housekeeper_.start("kv-house", [this] { keep_house(); });
}

std::string CopyEngine::backend() const {
    return format("host %s, %d thread%s", copy_variant().c_str(), threads_, threads_ == 1 ? "" : "s");
}

// ------------------------------------------------------------------ the caller's side

CopyEngine::Lock CopyEngine::lock_open() {
    Lock lock(mutex_);
    if (closing_) bad_argument("the engine is closed");
    return lock;
}

void CopyEngine::map_board(uint64_t session, int fd, uint32_t words) {
    const Lock lock = lock_open();
    boards_.map(session, fd, words);
}

void CopyEngine::drop_board(uint64_t session) {
    const Lock lock = lock_open();
    const auto of_session = [&](const auto& entry) { return entry.second->session == session; };
    if (std::any_of(caches_.begin(), caches_.end(), of_session)) {
        bad_argument(format("session %" PRIu64 " still has mapped caches", session));
    }
    boards_.drop(session);
}

void CopyEngine::map_cache(uint64_t cache, uint64_t session, const std::vector<int>& fds,
                           const std::vector<uint64_t>& buffer_bytes, std::vector<Group> groups) {
    if (fds.size() != buffer_bytes.size()) {
        throw Refusal("layout", format("%zu descriptors came for %zu buffers", fds.size(), buffer_bytes.size()));
    }
    auto mapped = std::make_shared<MappedCache>(MappedCache{session, Layout(std::move(groups), buffer_bytes), {}});
    for (const Group& group : mapped->layout.groups()) prepare_digest(group.shard_bytes);
    std::list<PrefaultOf> prefaults;
    for (size_t i = 0; i < fds.size(); ++i) {
        check_descriptor(i, fds[i], buffer_bytes[i]);
        const Mapping& buffer = mapped->buffers.emplace_back(fds[i], buffer_bytes[i], format("buffer %zu", i));
        prefaults.push_back({mapped, Prefault(fds[i], buffer.data(), buffer.bytes(), false)});
    }
    {
        const Lock lock = lock_open();
        boards_.of(session);  // throws unless it has one
        if (!caches_.emplace(cache, std::move(mapped)).second) {
            bad_argument(format("cache %" PRIu64 " is mapped already", cache));
        }
        // Before the arena, since the first jobs of this cache will come soon.
        prefaults_.splice(prefaults_.begin(), std::move(prefaults));
    }
    chore_ready_.notify_one();
}

void CopyEngine::unmap_cache(uint64_t cache) {
    {
        const Lock lock = lock_open();
        const auto found = caches_.find(cache);
        if (found == caches_.end() || found->second->leaving) {
            bad_argument(format("cache %" PRIu64 " is not mapped", cache));
        }
        found->second->leaving = true;
        if (found->second->jobs == 0) idle_leavers_.push_back(cache);
    }
    chore_ready_.notify_one();
}

void CopyEngine::submit(JobOrder order) {
    {
        const Lock lock = lock_open();
        const auto cache = caches_.find(order.cache);
        if (cache == caches_.end() || cache->second->leaving) {
            bad_argument(format("cache %" PRIu64 " is not mapped", order.cache));
        }
        const std::shared_ptr<Board>& board = boards_.of(cache->second->session);
        board->read(order.word);  // throws unless the board has it
        const uint64_t id = order.job;
        if (jobs_.contains(id)) bad_argument(format("job %" PRIu64 " is under way already", id));
        auto job = std::make_shared<CopyJob>(std::move(order), cache->second, board, arena_);
        jobs_.emplace(id, job);
        queue_of(*job).push_back(job);
        ++cache->second->jobs;
    }
    work_ready_.notify_one();
}

void CopyEngine::cancel(uint64_t job) {
    const Lock lock(mutex_);
    const auto found = jobs_.find(job);
    if (found == jobs_.end()) return;
    const JobPointer under_way = found->second;
    switch (under_way->stage()) {
        case CopyJob::Stage::QUEUED:
            leave_queue(under_way);
            end(under_way, under_way->cancelled());
            break;
        case CopyJob::Stage::PLANNING:
            under_way->stop();  // the worker that plans it ends it
            break;
        case CopyJob::Stage::COPYING:
            if (!under_way->has_piece()) break;  // its last pieces are being copied: let it complete
            leave_queue(under_way);
            under_way->stop();
            if (under_way->finished()) end(under_way, under_way->end());
            break;
    }
}

void CopyEngine::stop() {
    {
        const Lock lock(mutex_);
        closing_ = true;
        for (std::list<JobPointer>* queue : {&retrieves_, &stores_}) {
            const std::list<JobPointer> jobs = *queue;
            for (const JobPointer& job : jobs) {
                if (job->stage() != CopyJob::Stage::QUEUED) continue;
                leave_queue(job);
                end(job, job->cancelled());
            }
        }
    }
    work_ready_.notify_all();
    chore_ready_.notify_all();
}

void CopyEngine::close() {
    workers_.join();
    housekeeper_.join();  // which ends after the last job
    KV_ASSERT(jobs_.empty());
    prefaults_.clear();
    caches_.clear();
    boards_ = {};
    arena_.unmap();
}

// ------------------------------------------------------------------ the workers' side

void CopyEngine::work(size_t self) {
    Lock lock(mutex_);
    for (;;) {
        const JobPointer job = next_job();
        if (job == nullptr) {
            if (closing_) return;
            spread_.leave(self);
            work_ready_.wait(lock);
        } else if (job->stage() == CopyJob::Stage::QUEUED) {
            begin(self, job, lock);
        } else {
            copy_piece(self, job, lock);
        }
    }
}

// The first job with work for one more worker; skips jobs that others plan or finish.
CopyEngine::JobPointer CopyEngine::next_job() {
    for (const std::list<JobPointer>* queue : {&retrieves_, &stores_}) {
        for (const JobPointer& job : *queue) {
            if (job->stage() == CopyJob::Stage::QUEUED || job->has_piece()) return job;
        }
    }
    return nullptr;
}

void CopyEngine::begin(size_t self, const JobPointer& job, Lock& lock) {
    job->claim();
    lock.unlock();
    const bool begun = job->begin(threads_);
    lock.lock();
    if (!begun) {
        leave_queue(job);
        end(job, job->end());
        return;
    }
    job->release();
    if (job->has_piece()) {
        copy_piece(self, job, lock);
    } else {
        leave_queue(job);
        end(job, job->end());
    }
}

void CopyEngine::copy_piece(size_t self, const JobPointer& job, Lock& lock) {
    const CopyJob::Piece piece = job->take_piece();
    if (job->has_piece()) {
        work_ready_.notify_one();
    } else {
        leave_queue(job);
    }
    lock.unlock();
    spread_.settle(self);
    CopyJob::Copied copied = job->copy(piece);
    lock.lock();
    const bool queued = job->has_piece();
    job->piece_ended(piece, std::move(copied));
    if (queued && !job->has_piece()) leave_queue(job);
    if (job->finished()) end(job, job->end());
}

void CopyEngine::leave_queue(const JobPointer& job) {
    std::list<JobPointer>& queue = queue_of(*job);
    const auto found = std::find(queue.begin(), queue.end(), job);
    KV_ASSERT(found != queue.end());
    queue.erase(found);
}

void CopyEngine::end(const JobPointer& job, Completion completion) {
    const size_t ended = jobs_.erase(job->id());
    KV_ASSERT(ended == 1);
    MappedCache& cache = job->cache();
    KV_ASSERT(cache.jobs > 0);
    --cache.jobs;
    completions_.push(std::move(completion));
    if (cache.leaving && cache.jobs == 0) {
        idle_leavers_.push_back(job->cache_id());
        chore_ready_.notify_one();
    }
}

// ------------------------------------------------------------------ the housekeeper's side

void CopyEngine::keep_house() {
    Lock lock(mutex_);
    for (;;) {
        if (!idle_leavers_.empty()) {
            const uint64_t cache = idle_leavers_.front();
            idle_leavers_.pop_front();
            unmap(cache, lock);
        } else if (closing_ && jobs_.empty()) {
            return;
        } else if (closing_) {
            chore_ready_.wait(lock);  // for the last jobs, without filling page tables any more
        } else if (!prefault_something(lock)) {
            if (prefaults_.empty()) {
                chore_ready_.wait(lock);
            } else {
                chore_ready_.wait_for(lock, GROWTH_POLL);
            }
        }
    }
}

void CopyEngine::unmap(uint64_t cache, Lock& lock) {
    const auto found = caches_.find(cache);
    KV_ASSERT(found != caches_.end());
    const std::shared_ptr<MappedCache> leaver = found->second;
    KV_ASSERT(leaver->jobs == 0);
    caches_.erase(found);
    prefaults_.remove_if([&](const PrefaultOf& entry) { return entry.cache == leaver; });
    lock.unlock();
    leaver->buffers.clear();  // page tables of a large pool take milliseconds to tear down
    lock.lock();
    completions_.push({cache, Status::UNMAPPED});
}

// Does one step for the first mapping with something to do. Only this thread removes entries, so the entry stays while
// the lock is released.
bool CopyEngine::prefault_something(Lock& lock) {
    for (auto entry = prefaults_.begin(); entry != prefaults_.end();) {
        lock.unlock();
        const Prefault::Step step = entry->prefault.step();
        lock.lock();
        if (step == Prefault::Step::PROGRESS) return true;
        entry = step == Prefault::Step::FINISHED ? prefaults_.erase(entry) : std::next(entry);
    }
    return false;
}

}  // namespace kv
