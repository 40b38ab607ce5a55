#include "keys/namer.h"

#include <unistd.h>

#include <utility>

#include "base/threads.h"

namespace kv {

bool Naming::ready() const {
    const std::lock_guard lock(mutex_);
    return state_ == State::READY;
}

void Naming::carry_out() {
    {
        const std::lock_guard lock(mutex_);
        if (state_ != State::QUEUED) return;
        state_ = State::RUNNING;
    }
    Keys keys = chain_keys({chain_.tokens.get(), chain_.count}, chain_.chunk_tokens, chain_.before);
    chain_.tokens.reset();
    const std::lock_guard lock(mutex_);
    keys_ = std::move(keys);
    state_ = State::READY;
    ended_.notify_all();
}

bool Naming::wait(std::chrono::nanoseconds most) {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, most, [this] { return state_ == State::READY; });
}

const Keys& Naming::keys() {
    carry_out();
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return state_ == State::READY; });
    return keys_;
}

Namer::Namer() : owner_(::getpid()), work_(std::make_unique<Work>()) {}

Namer::~Namer() {
    if (::getpid() != owner_) {
        (void)work_.release();  // after fork() the thread cannot be joined, nor its condition variable destroyed
        return;
    }
    {
        const std::lock_guard lock(work_->mutex);
        work_->closing = true;
    }
    work_->ready.notify_all();
    if (work_->thread.joinable()) work_->thread.join();
}

std::shared_ptr<Naming> Namer::name(Chain chain) {
    auto naming = std::make_shared<Naming>(std::move(chain));
    if (::getpid() != owner_) return naming;
    {
        const std::lock_guard lock(work_->mutex);
        if (!work_->thread.joinable()) work_->thread = start_thread("kv-keys", [work = work_.get()] { work->run(); });
        work_->queue.push_back(naming);
    }
    work_->ready.notify_one();  // after unlocking, since the thread takes the lock as soon as it wakes up
    return naming;
}

void Namer::Work::run() {
    std::unique_lock lock(mutex);
    for (;;) {
        ready.wait(lock, [this] { return closing || !queue.empty(); });
        if (closing) return;
        const std::shared_ptr<Naming> naming = std::move(queue.front());
        queue.pop_front();
        lock.unlock();
        naming->carry_out();
        lock.lock();
    }
}

}  // namespace kv
