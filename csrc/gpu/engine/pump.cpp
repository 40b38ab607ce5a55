#include "gpu/engine/pump.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/threads.h"

namespace kv::gpu {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Interval of polling while nothing advances: a DMA of a segment takes 300 us, a client's gather about as long.
constexpr microseconds NAP_COPYING{20};
constexpr microseconds NAP_PACKING{50};
constexpr microseconds NAP_MAX{1000};
// The pump polls on for this long after its last job: waking a thread takes up to 250 us on a virtual machine.
constexpr microseconds LINGER{1000};
// After this long without progress, polling slows down.
constexpr milliseconds PATIENCE{10};
constexpr unsigned long TIMER_SLACK_NS = 1000;  // the default of 50 us would be most of a nap

// Jobs of one packer or cache that run at once: the next one fills the link while another drains.
constexpr int64_t RUNNING_OF_ONE_MAX = 4;

}  // namespace

Pump::Pump(const std::string& name, const Driver& driver, int ordinal, PumpEvents events)
    : driver_(driver), ordinal_(ordinal), events_(std::move(events)), thread_(start_thread(name, [this] { run(); })) {}

Pump::~Pump() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void Pump::add(DeviceJobPointer job) {
    {
        const std::lock_guard lock(mutex_);
        arrived_.push_back(std::move(job));
    }
    changed_.notify_one();
}

void Pump::wake() {
    {
        const std::lock_guard lock(mutex_);
        woken_ = true;
    }
    changed_.notify_one();
}

// ------------------------------------------------------------------ the thread

void Pump::run() {
    ::prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
    try {
        const Current current(driver_, ordinal_);
        while (take_arrived()) {
            const bool begun = admit();
            if (advance_all() || begun) {
                moved_at_ = Clock::now();
            } else {
                nap();
            }
        }
    } catch (const DriverError& error) {
        events_.broken(error.what());
    }
}

// Takes new jobs. False when the pump closes and no job is left.
bool Pump::take_arrived() {
    const std::lock_guard lock(mutex_);
    queued_.insert(queued_.end(), arrived_.begin(), arrived_.end());
    arrived_.clear();
    woken_ = false;
    return !closing_ || !queued_.empty() || !running_.empty();
}

// Begins queued jobs, first come first served among those that share segments.
bool Pump::admit() {
    bool moved = false;
    for (auto queued = queued_.begin(); queued != queued_.end();) {
        const DeviceJobPointer job = *queued;
        if (!job->stopped() && !may_begin(*job)) {
            ++queued;
            continue;
        }
        queued = queued_.erase(queued);
        moved = true;
        if (job->begin()) {
            running_.push_back(job);
        } else {
            events_.ended(job, job->end());
        }
    }
    return moved;
}

bool Pump::may_begin(const DeviceJob& job) const {
    const auto shares = [&](const DeviceJobPointer& other) { return other->shares() == job.shares(); };
    const auto busy = [&](const DeviceJobPointer& other) { return shares(other) && !other->all_cut(); };
    return std::none_of(running_.begin(), running_.end(), busy) &&
           std::count_if(running_.begin(), running_.end(), shares) < RUNNING_OF_ONE_MAX;
}

bool Pump::is_alone(const DeviceJob& job) const {
    const auto other = [&](const DeviceJobPointer& it) { return it.get() != &job && it->shares() == job.shares(); };
    return std::none_of(running_.begin(), running_.end(), other) && std::none_of(queued_.begin(), queued_.end(), other);
}

bool Pump::advance_all() {
    bool moved = false;
    for (auto running = running_.begin(); running != running_.end();) {
        const DeviceJobPointer job = *running;
        moved |= job->advance(is_alone(*job));
        if (!job->finished()) {
            ++running;
            continue;
        }
        running = running_.erase(running);
        moved = true;
        events_.ended(job, job->end());
    }
    return moved;
}

void Pump::nap() {
    const auto pending = [this] { return woken_ || closing_ || !arrived_.empty(); };
    std::unique_lock lock(mutex_);
    if (running_.empty()) {
        KV_ASSERT(queued_.empty());
        if (Clock::now() - moved_at_ < LINGER) {
            changed_.wait_for(lock, NAP_COPYING, pending);
            return;
        }
        changed_.wait(lock, pending);
        moved_at_ = Clock::now();
        return;
    }
    const bool copying = std::any_of(running_.begin(), running_.end(), [](const auto& job) { return job->copying(); });
    const auto still = std::chrono::duration_cast<microseconds>(Clock::now() - moved_at_);
    const microseconds least = copying ? NAP_COPYING : NAP_PACKING;
    // After ten milliseconds, a nap is a tenth of the time without progress so far.
    changed_.wait_for(lock, still < PATIENCE ? least : std::clamp(still / 10, least, NAP_MAX),
                      [this] { return woken_ || !arrived_.empty(); });
}

}  // namespace kv::gpu
