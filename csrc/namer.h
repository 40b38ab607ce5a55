// Names long prompts in a thread of its own, while the thread that knows their tokens goes on.

#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "keys.h"

namespace kv {

// The keys of one prompt, now or soon. Any thread.
class Naming {
  public:
    Naming(std::vector<uint32_t> tokens, size_t chunk_tokens, const Digest& before)
        : tokens_(std::move(tokens)), chunk_tokens_(chunk_tokens), before_(before) {}

    bool ready() const;

    // Hashes, unless somebody else does already.
    void carry_out();

    // What nobody has begun is hashed by the caller: he would only wait for another thread to wake up.
    const Keys& keys();

  private:
    enum class State { QUEUED, RUNNING, READY };

    std::vector<uint32_t> tokens_;
    const size_t chunk_tokens_;
    const Digest before_;
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
    std::shared_ptr<Naming> name(std::vector<uint32_t> tokens, size_t chunk_tokens, const Digest& before);

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
