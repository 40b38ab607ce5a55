// Threads that compute checksums of payloads, so that lanes keep to their devices.

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
    explicit Hashers(unsigned threads);
    // Ends what was asked for, joins.
    ~Hashers();

    // Calls `done` with the checksum, by another thread. The bytes must stay until then.
    void hash(std::span<const std::byte> bytes, std::function<void(uint64_t)> done);

  private:
    struct Task {
        std::span<const std::byte> bytes;
        std::function<void(uint64_t)> done;
    };

    void work();

    std::mutex mutex_;  // guards everything below
    std::condition_variable work_ready_;
    std::deque<Task> tasks_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace kv::disk
