// I/O by threads, for systems that forbid io_uring: each request occupies a thread.

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/threads.h"
#include "disk/io.h"

namespace kv::disk {
namespace {

class ThreadsIo : public Io {
  public:
    ThreadsIo(Files files, unsigned threads)
        : files_(files), name_(format("%u threads", threads)), crew_("kv-io", threads) {}

    void submit(Request& request) override {
        Crew::Task task = [this, &request] {
            carry_out(request);
            const std::lock_guard lock(mutex_);
            ended_.push_back(&request);
            something_ended_.notify_one();
        };
        crew_.add({&task, 1});
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

    std::string name() const override { return name_; }

  private:
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
    const std::string name_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable something_ended_;
    std::vector<Request*> ended_;
    bool woken_ = false;
    Crew crew_;
};

}  // namespace

std::unique_ptr<Io> open_threads(Files files, unsigned threads) { return std::make_unique<ThreadsIo>(files, threads); }

}  // namespace kv::disk
