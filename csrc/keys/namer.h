// A thread that names long prompts, while the calling thread goes on.

#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "keys/keys.h"

namespace kv {

// Arguments of chain_keys().
struct Chain {
    std::unique_ptr<const uint32_t[]> tokens;
    size_t count;
    size_t chunk_tokens;
    Digest before;
};

// A future of the keys of one prompt. Any thread.
class Naming {
  public:
    explicit Naming(Chain chain) : chain_(std::move(chain)) {}

    bool ready() const;

    // Hashes, unless another thread does already.
    void carry_out();

    // Waits up to that time; true when the keys are ready. Leaves the hashing to the namer's thread.
    bool wait(std::chrono::nanoseconds most);

    // The keys. Hashes here if nobody has begun, since waiting for another thread to wake up would take longer.
    const Keys& keys();

  private:
    enum class State { QUEUED, RUNNING, READY };

    Chain chain_;
    mutable std::mutex mutex_;
    std::condition_variable ended_;
    State state_ = State::QUEUED;
    Keys keys_;
};

// Owns the thread, which begins with the first naming. The destructor drops queued namings and joins. A child after
// fork() has no such thread, but can still hash namings of its parent that nobody had begun.
class Namer {
  public:
    Namer();
    ~Namer();
    std::shared_ptr<Naming> name(Chain chain);

  private:
    // Everything that the thread uses.
    struct Work {
        std::mutex mutex;
        std::condition_variable ready;
        std::deque<std::shared_ptr<Naming>> queue;
        bool closing = false;
        std::thread thread;

        void run();
    };

    const pid_t owner_;
    std::unique_ptr<Work> work_;
};

}  // namespace kv
