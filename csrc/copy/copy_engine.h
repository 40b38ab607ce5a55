// Host copies between registered KV pools and the arena, by worker threads.
//
// Threads: one thread calls the methods (the mover's loop); `threads` workers copy; one housekeeper fills page tables
// and unmaps. No call waits for a copy, except close().
//
// Order: retrieves before stores, each kind first come first served. All workers share the job in front; a retrieve
// waits at most for the pieces that workers are copying when it arrives.
//
// Ends: every submitted job gives exactly one completion, every unmap_cache exactly one, after the cache's last job.
// The word of a job reaches DONE only after all its bytes are in place, FAILED only when none is being copied any more.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/completion_queue.h"
#include "base/cpu_spread.h"
#include "base/prefault.h"
#include "base/shared_memory.h"
#include "base/threads.h"
#include "copy/board.h"
#include "copy/copy_job.h"
#include "copy/layout.h"

namespace kv {

class CopyEngine {
  public:
    // Maps the arena; the descriptor stays the caller's, here and below.
    CopyEngine(int arena_fd, uint64_t arena_bytes, int threads);
    ~CopyEngine() { close(); }

    std::string backend() const;
    int eventfd() const { return completions_.eventfd(); }

    void map_board(uint64_t session, int fd, uint32_t words);
    // bad_argument while a cache of the session is mapped.
    void drop_board(uint64_t session);

    // Refusal("layout" | "descriptor-size" | "descriptor-seal") leaves nothing mapped.
    void map_cache(uint64_t cache, uint64_t session, const std::vector<int>& fds,
                   const std::vector<uint64_t>& buffer_bytes, std::vector<Group> groups);
    void unmap_cache(uint64_t cache);

    // bad_argument (and no completion) for an unknown or leaving cache, an unmapped word, or a job number in use.
    void submit(JobOrder order);
    // Ends a job after the pieces that are being copied, in about a millisecond. A job that has ended, or was never
    // submitted, is not an error: its completion may be under way.
    void cancel(uint64_t job);

    std::vector<Completion> completions(size_t most) { return completions_.take(most); }

    // Cancels jobs that have not begun, finishes the others, joins, unmaps. completions() may still be called.
    void close();

  private:
    using JobPointer = std::shared_ptr<CopyJob>;
    using Lock = std::unique_lock<std::mutex>;
    struct PrefaultOf {
        std::shared_ptr<MappedCache> cache;  // null for the arena's
        Prefault prefault;
    };

    Lock lock_open();
    void stop();
    void work(size_t self);
    JobPointer next_job();
    void begin(size_t self, const JobPointer& job, Lock& lock);
    void copy_piece(size_t self, const JobPointer& job, Lock& lock);
    void leave_queue(const JobPointer& job);
    void end(const JobPointer& job, Completion completion);

    void keep_house();
    void unmap(uint64_t cache, Lock& lock);
    bool prefault_something(Lock& lock);

    std::list<JobPointer>& queue_of(const CopyJob& job) {
        return job.kind() == JobKind::RETRIEVE ? retrieves_ : stores_;
    }

    const int threads_;
    Mapping arena_;
    CompletionQueue<Completion> completions_;
    Spread spread_;

    std::mutex mutex_;  // guards everything below
    std::condition_variable work_ready_;
    std::condition_variable chore_ready_;
    bool closing_ = false;
    Boards boards_;
    std::unordered_map<uint64_t, std::shared_ptr<MappedCache>> caches_;
    std::unordered_map<uint64_t, JobPointer> jobs_;  // submitted and not ended
    std::list<JobPointer> retrieves_;                // with work left to begin or to hand out
    std::list<JobPointer> stores_;
    std::list<PrefaultOf> prefaults_;
    std::deque<uint64_t> idle_leavers_;  // caches to unmap now

    Threads workers_;
    Threads housekeeper_;
};

}  // namespace kv
