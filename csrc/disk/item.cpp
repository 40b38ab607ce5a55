#include "disk/item.h"

#include <algorithm>
#include <cinttypes>

#include "base/check.h"

namespace kv::disk {

void Ends::expect(uint64_t job, size_t items) {
    const std::lock_guard lock(mutex_);
    if (!left_.emplace(job, items).second) bad_argument(format("job %" PRIu64 " is under way already", job));
    items_left_ += items;
}

void Ends::push(const Completion& completion) {
    {
        const std::lock_guard lock(mutex_);
        completions_.push_back(completion);
        const auto job = left_.find(completion.job);
        KV_ASSERT(job != left_.end());
        if (--job->second == 0) left_.erase(job);
        --items_left_;
    }
    signal_eventfd(event_.get());
}

std::vector<Completion> Ends::take(size_t most) {
    const std::lock_guard lock(mutex_);
    const auto end = completions_.begin() + static_cast<std::ptrdiff_t>(std::min(most, completions_.size()));
    std::vector<Completion> taken(completions_.begin(), end);
    completions_.erase(completions_.begin(), end);
    if (!completions_.empty()) signal_eventfd(event_.get());
    return taken;
}

size_t Ends::items_left() const {
    const std::lock_guard lock(mutex_);
    return items_left_;
}

}  // namespace kv::disk
