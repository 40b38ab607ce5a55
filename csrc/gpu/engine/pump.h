// The thread of one direction: it advances the running jobs, in the order of their arrival, and polls the events that
// they wait for. Jobs of different caches run side by side, so that a client that has stopped delays only itself.

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
    // The job has ended, and the pump has dropped it.
    std::function<void(const DeviceJobPointer& job, Completion completion)> ended;
    // The driver failed on the data path; the pump has stopped for good, and its jobs do not end.
    std::function<void(const std::string& message)> broken;
};

class Pump {
  public:
    // Starts the thread. Events are called on it.
    Pump(const std::string& name, const Driver& driver, int ordinal, PumpEvents events);
    // Waits until all jobs have ended; they must have been stopped.
    ~Pump();

    void add(DeviceJobPointer job);
    // Makes the thread look at all jobs again soon, since one was stopped.
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

    std::mutex mutex_;  // guards the members shared with callers: those up to closing_
    std::condition_variable changed_;
    std::deque<DeviceJobPointer> arrived_;
    bool woken_ = false;
    bool closing_ = false;

    // used by the thread only
    std::list<DeviceJobPointer> queued_;
    std::list<DeviceJobPointer> running_;
    Clock::time_point moved_at_;  // when a job last advanced

    std::thread thread_;  // last: it uses all of the above
};

}  // namespace kv::gpu
