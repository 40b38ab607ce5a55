#include "namer.h"

#include <utility>

#include "named_thread.h"

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
    Keys keys = chain_keys(tokens_, chunk_tokens_, before_);
    const std::lock_guard lock(mutex_);
    tokens_ = {};
    keys_ = std::move(keys);
    state_ = State::READY;
    ended_.notify_all();
}

const Keys& Naming::keys() {
    carry_out();
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return state_ == State::READY; });
    return keys_;
}

Namer::~Namer() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    work_ready_.notify_all();
    if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Naming> Namer::name(std::vector<uint32_t> tokens, size_t chunk_tokens, const Digest& before) {
    auto naming = std::make_shared<Naming>(std::move(tokens), chunk_tokens, before);
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = start_thread("kv-keys", [this] { work(); });
    queue_.push_back(naming);
    work_ready_.notify_one();
    return naming;
}

void Namer::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_ready_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (closing_) return;
        const std::shared_ptr<Naming> naming = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        naming->carry_out();
        lock.lock();
    }
}

}  // namespace kv
