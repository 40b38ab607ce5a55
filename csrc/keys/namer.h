// Names long prompts in a thread of its own, while the thread that knows them goes on.

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

// What is to be hashed by chain_keys().
struct Chain {
    std::unique_ptr<const uint32_t[]> tokens;
    size_t count;
    size_t chunk_tokens;
    Digest before;
};

// The keys of one prompt, now or soon. Any thread.
class Naming {
  public:
    explicit Naming(Chain chain) : chain_(std::move(chain)) {}

    bool ready() const;

    // Hashes, unless somebody else does already.
    void carry_out();

    // True when it is ready, at once or within that time. Leaves the hashing to the namer's thread.
    bool wait(std::chrono::nanoseconds most);

    // What nobody has begun is hashed by the caller: he would only wait for another thread to wake up.
    const Keys& keys();

  private:
    enum class State { QUEUED, RUNNING, READY };

    Chain chain_;
    mutable std::mutex mutex_;
    std::condition_variable ended_;
    State state_ = State::QUEUED;
    Keys keys_;
};

// Owns the thread, which begins with the first naming. The destructor forgets what is queued and joins. In a child
// after fork() there is no such thread: what its parent had asked for and nobody had begun can still be hashed there.
class Namer {
  public:
    Namer();
    ~Namer();
    std::shared_ptr<Naming> name(Chain chain);

  private:
    // All that the thread uses.
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
