// I/O by threads, for systems that forbid io_uring: each request occupies a thread.

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/named_thread.h"
#include "disk/io.h"

namespace kv::disk {
namespace {

class ThreadsIo : public Io {
  public:
    ThreadsIo(Files files, unsigned threads) : files_(files) {
        for (unsigned i = 0; i < threads; ++i)
            threads_.push_back(start_thread(format("kv-io-%u", i), [this] { work(); }));
    }

    ~ThreadsIo() override {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
        }
        work_ready_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    void submit(Request& request) override {
        {
            const std::lock_guard lock(mutex_);
            waiting_.push_back(&request);
        }
        work_ready_.notify_one();
    }

    void collect(std::vector<Request*>& ended) override {
        std::unique_lock lock(mutex_);
        something_ended_.wait(lock, [this] { return woken_ || !ended_.empty(); });
        woken_ = false;
        ended.insert(ended.end(), ended_.begin(), ended_.end());
        ended_.clear();
    }

    void wake() override {
        {
            const std::lock_guard lock(mutex_);
            woken_ = true;
        }
        something_ended_.notify_one();
    }

    std::string name() const override { return format("%zu threads", threads_.size()); }

  private:
    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            work_ready_.wait(lock, [this] { return closing_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            Request& request = *waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            carry_out(request);
            lock.lock();
            ended_.push_back(&request);
            something_ended_.notify_one();
        }
    }

    void carry_out(Request& request) const {
        const int fd = files_.of(request.file);
        const auto offset = static_cast<off_t>(request.offset);
        ssize_t moved;
        do {
            moved = request.direction == Direction::READ ? ::pread(fd, request.memory, request.bytes, offset)
                                                         : ::pwrite(fd, request.memory, request.bytes, offset);
        } while (moved < 0 && errno == EINTR);
        request.result = moved < 0 ? -errno : moved;
    }

    const Files files_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable work_ready_;
    std::condition_variable something_ended_;
    std::deque<Request*> waiting_;
    std::vector<Request*> ended_;
    bool woken_ = false;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Io> open_threads(Files files, unsigned threads) { return std::make_unique<ThreadsIo>(files, threads); }

}  // namespace kv::disk
