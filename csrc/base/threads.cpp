#include "base/threads.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace kv {

std::thread start_thread(const std::string& name, std::function<void()> body) {
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before);  // the new thread inherits it
    struct Restore {
        const sigset_t& mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
    } const restore{before};
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
}

void lower_priority(int niceness) {
    // On Linux each thread has its own niceness.
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), niceness);
}

void Threads::start(const std::string& name, std::function<void()> body) {
    threads_.push_back(start_thread(name, std::move(body)));
}

void Threads::join() {
    stop_();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

Crew::Crew(const std::string& name, size_t threads)
    : threads_([this] {
          {
              const std::lock_guard lock(mutex_);
              closing_ = true;
          }
          ready_.notify_all();
      }) {
    for (size_t i = 0; i < threads; ++i) threads_.start(name + "-" + std::to_string(i), [this] { work(); });
}

void Crew::add(std::span<Task> tasks) {
    {
        const std::lock_guard lock(mutex_);
        for (Task& task : tasks) tasks_.push_back(std::move(task));
    }
    for (size_t i = 0; i < tasks.size(); ++i) ready_.notify_one();
}

void Crew::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        ready_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        const Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        lock.lock();
    }
}

}  // namespace kv
