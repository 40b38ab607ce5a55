// Threads that compute checksums of payloads, so that lanes have time for their devices.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace kv::disk {

class Hashers {
  public:
    struct Task {
        std::span<const std::byte> bytes;    // must stay valid until `done` was called
        std::function<void(uint64_t)> done;  // called with the checksum, on another thread
    };

    explicit Hashers(unsigned threads);
    // Finishes all tasks and joins.
    ~Hashers();

    // Moves all tasks into the queue, in order.
    void hash(std::vector<Task>& tasks);

  private:
    void work();

    std::mutex mutex_;  // guards everything below
    std::condition_variable work_ready_;
    std::deque<Task> tasks_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace kv::disk
