#include "gpu/staging/event_watch.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "base/completion_queue.h"
#include "base/threads.h"
#include "gpu/driver/handles.h"

namespace kv::gpu {
namespace {

// Polling is frequent for a new event, and slows down for one that takes long.
constexpr std::chrono::microseconds NAP_LEAST{20};
constexpr std::chrono::microseconds NAP_MOST{200};
constexpr unsigned long TIMER_SLACK_NS = 1000;  // without it a nap of 20 us takes 70

struct Watched {
    uint64_t ticket;
    EventPointer event;
};

}  // namespace

struct EventWatch::Work {
    Work(const Driver& driver_, int ordinal_) : driver(driver_), ordinal(ordinal_) {
        thread = start_thread("kv-events", [this] { run(); });
    }

    void run() {
        ::prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
        std::optional<Current> current;
        try {
            current.emplace(driver, ordinal);
            driver.relax_capture_mode();
        } catch (const DriverError&) {
            current.reset();  // every query will fail, which the tickets report
        }
        std::vector<Watched> watched;
        auto nap = NAP_LEAST;
        while (wait_for_work(watched)) {
            nap = poll(watched) ? NAP_LEAST : std::min(nap * 2, NAP_MOST);
            std::this_thread::sleep_for(nap);
        }
    }

    // Takes new events; sleeps while there are none at all. False: closing.
    bool wait_for_work(std::vector<Watched>& watched) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return closing || !news.empty() || !watched.empty(); });
        watched.insert(watched.end(), news.begin(), news.end());
        news.clear();
        return !closing;
    }

    // Moves finished tickets to `completed`. Whether there were any.
    bool poll(std::vector<Watched>& watched) {
        const auto ended = std::erase_if(watched, [&](const Watched& one) {
            try {
                if (!driver.event_done(one.event)) return false;
                completed.push({one.ticket, true});
            } catch (const DriverError&) {
                completed.push({one.ticket, false});
            }
            return true;
        });
        return ended > 0;
    }

    const Driver& driver;
    const int ordinal;
    const pid_t owner = ::getpid();
    CompletionQueue<std::pair<uint64_t, bool>> completed;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Watched> news;
    bool closing = false;
    std::thread thread;
};

EventWatch::EventWatch(const Driver& driver, int ordinal) : work_(std::make_unique<Work>(driver, ordinal)) {}

EventWatch::~EventWatch() {
    if (work_->owner != ::getpid()) {
        [[maybe_unused]] Work* parents = work_.release();
        return;
    }
    {
        const std::lock_guard lock(work_->mutex);
        work_->closing = true;
    }
    work_->changed.notify_one();
    work_->thread.join();
}

void EventWatch::watch(uint64_t ticket, EventPointer event) {
    {
        const std::lock_guard lock(work_->mutex);
        work_->news.push_back({ticket, event});
    }
    work_->changed.notify_one();
}

int EventWatch::eventfd() const { return work_->completed.eventfd(); }

std::vector<std::pair<uint64_t, bool>> EventWatch::completed() { return work_->completed.take(SIZE_MAX); }

}  // namespace kv::gpu
