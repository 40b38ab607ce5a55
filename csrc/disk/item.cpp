#include "disk/item.h"

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
        const auto job = left_.find(completion.job);
        KV_ASSERT(job != left_.end());
        if (--job->second == 0) left_.erase(job);
        --items_left_;
    }
    completions_.push(completion);
}

size_t Ends::items_left() const {
    const std::lock_guard lock(mutex_);
    return items_left_;
}

}  // namespace kv::disk
