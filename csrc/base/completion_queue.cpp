#include "base/completion_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace kv {

const char* name_of(Status status) {
    switch (status) {
        case Status::DONE:
            return "done";
        case Status::ABANDONED:
            return "abandoned";
        case Status::FAILED:
            return "failed";
        case Status::INVALID:
            return "invalid";
        case Status::UNMAPPED:
            return "unmapped";
        case Status::MAPPED:
            return "mapped";
        case Status::REFUSED:
            return "refused";
        case Status::BROKEN:
            return "broken";
    }
    KV_ASSERT(false);
}

void CompletionQueue::push(Completion completion) {
    {
        const std::lock_guard lock(mutex_);
        completions_.push_back(std::move(completion));
    }
    signal_eventfd(event_.get());
}

std::vector<Completion> CompletionQueue::take(size_t most) {
    const std::lock_guard lock(mutex_);
    const auto end = completions_.begin() + static_cast<std::ptrdiff_t>(std::min(most, completions_.size()));
    std::vector<Completion> taken(std::make_move_iterator(completions_.begin()), std::make_move_iterator(end));
    completions_.erase(completions_.begin(), end);
    if (!completions_.empty()) signal_eventfd(event_.get());
    return taken;
}

}  // namespace kv
