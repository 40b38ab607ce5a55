#include "disk/hashers.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/named_thread.h"
#include "base/xxh3.h"

namespace kv::disk {

Hashers::Hashers(unsigned threads) {
    for (unsigned i = 0; i < threads; ++i) {
        threads_.push_back(start_thread(format("kv-hash-%u", i), [this] { work(); }));
    }
}

Hashers::~Hashers() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    work_ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Hashers::hash(std::vector<Task>& tasks) {
    {
        const std::lock_guard lock(mutex_);
        std::move(tasks.begin(), tasks.end(), std::back_inserter(tasks_));
    }
    for (size_t i = 0; i < std::min(tasks.size(), threads_.size()); ++i) work_ready_.notify_one();
    tasks.clear();
}

void Hashers::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_ready_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        const Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task.done(xxh3(task.bytes));
        lock.lock();
    }
}

}  // namespace kv::disk
