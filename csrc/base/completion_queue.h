// The queue of completions of jobs and mappings, from worker threads to the one thread that reports them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/shared_memory.h"

namespace kv {

// MAPPED, REFUSED, BROKEN: only from engines that map in the background, and for devices that can fail as a whole.
enum class Status { DONE, ABANDONED, FAILED, INVALID, UNMAPPED, MAPPED, REFUSED, BROKEN };

inline const char* name_of(Status status) {
    constexpr const char* NAMES[] = {"done",     "abandoned", "failed",  "invalid",
                                     "unmapped", "mapped",    "refused", "broken"};
    return NAMES[static_cast<size_t>(status)];
}

struct Completion {
    uint64_t subject;  // job; cache when UNMAPPED, MAPPED or REFUSED; 0 when BROKEN
    Status status;
    uint64_t bytes = 0;
    uint64_t copy_ns = 0;
    std::string code = {};
    std::string message = {};
    const char* mode = "direct";  // how a job's bytes were copied
    // With digests. Shards are those with a slot, in the order of the job's groups and their slots.
    std::vector<uint64_t> sums = {};   // of a store that is DONE: of each shard
    std::vector<uint32_t> wrong = {};  // of a retrieve that FAILED as "digest": the shards whose bytes are not right
};

// Any thread may push and take. The eventfd is readable whenever completions may wait. Read it, then call take() once;
// if take() leaves some, the eventfd becomes readable again.
template <typename End>
class CompletionQueue {
  public:
    int eventfd() const { return event_.get(); }

    void push(End end) {
        {
            const std::lock_guard lock(mutex_);
            ends_.push_back(std::move(end));
        }
        signal_eventfd(event_.get());
    }

    std::vector<End> take(size_t most) {
        const std::lock_guard lock(mutex_);
        const auto last = ends_.begin() + static_cast<std::ptrdiff_t>(std::min(most, ends_.size()));
        std::vector<End> taken(std::move_iterator(ends_.begin()), std::move_iterator(last));
        ends_.erase(ends_.begin(), last);
        if (!ends_.empty()) signal_eventfd(event_.get());
        return taken;
    }

  private:
    const Descriptor event_ = create_eventfd();
    std::mutex mutex_;
    std::deque<End> ends_;
};

}  // namespace kv
