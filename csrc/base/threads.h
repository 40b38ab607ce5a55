// Threads of the data plane: they have names, for tools like top, and block signals.
//
// A signal for the process must reach the interpreter's main thread, which waits in poll() and would go on sleeping if
// another thread took the signal. Faults (SIGBUS and the like) always go to the thread that caused them.

#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kv {

// `name`: at most 15 characters reach the kernel. std::system_error when the system has no more threads.
std::thread start_thread(const std::string& name, std::function<void()> body);

// Gives the calling thread this niceness; serving threads have 0. If it cannot be set, only the pace changes.
void lower_priority(int niceness);

// The threads of one object. Declare it last, so that they end before what they use. An object whose constructor fails
// because a thread cannot start ends the threads before it, too.
class Threads {
  public:
    // `stop` makes the bodies return. It may be called several times.
    explicit Threads(std::function<void()> stop = [] {}) : stop_(std::move(stop)) {}
    ~Threads() { join(); }
    void start(const std::string& name, std::function<void()> body);
    void join();

  private:
    const std::function<void()> stop_;
    std::vector<std::thread> threads_;
};

// Threads that carry out tasks, in the order in which these were added.
class Crew {
  public:
    using Task = std::function<void()>;

    Crew(const std::string& name, size_t threads);
    // The destructor carries out all tasks that are left, and joins.

    // Any thread. Moves the tasks away. Threads wake up after all are queued, since they would take the caller's
    // processor otherwise.
    void add(std::span<Task> tasks);

  private:
    void work();

    std::mutex mutex_;  // guards everything below
    std::condition_variable ready_;
    std::deque<Task> tasks_;
    bool closing_ = false;
    Threads threads_;
};

}  // namespace kv
