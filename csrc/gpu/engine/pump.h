// The thread of one direction: it moves the running jobs on, in the order of their arrival, and polls what they wait
// for. Jobs of different caches run side by side, so that a client which has stopped costs nobody but itself.

#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "gpu/engine/device_job.h"

namespace kv::gpu {

using DeviceJobPointer = std::shared_ptr<DeviceJob>;

struct PumpEvents {
    // The job is no longer the pump's.
    std::function<void(const DeviceJobPointer& job, Completion completion)> ended;
    // The driver failed on the data path; the pump has stopped for good, its jobs do not end.
    std::function<void(const std::string& message)> broken;
};

class Pump {
  public:
    // Starts the thread. Events are called on it.
    Pump(const std::string& name, const Driver& driver, int ordinal, PumpEvents events);
    // Jobs must have been stopped; waits until they have ended.
    ~Pump();

    void add(DeviceJobPointer job);
    // Looks at all jobs again soon: one was stopped.
    void wake();

  private:
    using Clock = std::chrono::steady_clock;
    void run();
    bool take_arrived();
    bool admit();
    bool may_begin(const DeviceJob& job) const;
    bool is_alone(const DeviceJob& job) const;
    bool advance_all();
    void nap();

    const Driver& driver_;
    const int ordinal_;
    const PumpEvents events_;

    std::mutex mutex_;  // guards what is shared with the callers
    std::condition_variable changed_;
    std::deque<DeviceJobPointer> arrived_;
    bool woken_ = false;
    bool closing_ = false;

    // the thread's own
    std::list<DeviceJobPointer> queued_;
    std::list<DeviceJobPointer> running_;
    Clock::time_point moved_at_;  // when a job moved last

    std::thread thread_;  // last: it uses all of the above
};

}  // namespace kv::gpu
