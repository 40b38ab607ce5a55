// The queue of completions of jobs and mappings, from worker threads to the one thread that reports them.

#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "base/shared_memory.h"

namespace kv {

// MAPPED, REFUSED, BROKEN: only from engines that map in the background, and for devices that can fail as a whole.
enum class Status { DONE, ABANDONED, FAILED, INVALID, UNMAPPED, MAPPED, REFUSED, BROKEN };

const char* name_of(Status status);

struct Completion {
    uint64_t subject;  // job; cache when UNMAPPED, MAPPED or REFUSED; 0 when BROKEN
    Status status;
    uint64_t bytes = 0;
    uint64_t copy_ns = 0;
    std::string code = {};
    std::string message = {};
    const char* mode = "direct";  // how a job's bytes were copied
};

// Any thread may push and take. The eventfd is readable whenever completions may wait. Read it, then call take() once;
// if take() leaves some, the eventfd becomes readable again.
class CompletionQueue {
  public:
    CompletionQueue() : event_(create_eventfd()) {}
    int eventfd() const { return event_.get(); }
    void push(Completion completion);
    std::vector<Completion> take(size_t most);

  private:
    Descriptor event_;
    std::mutex mutex_;
    std::deque<Completion> completions_;
};

}  // namespace kv
