// Watches events that the engine has recorded on its own streams, and reports when they are done.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/driver/driver.h"

namespace kv::gpu {

// Thread-safe. Owns one thread, which polls only while something is watched: a driver has no descriptor to wait on.
class EventWatch {
  public:
    EventWatch(const Driver& driver, int ordinal);
    // Joins the thread and drops watched events. Does nothing in a forked child, which has no such thread.
    ~EventWatch();

    // The event must live until its ticket is among the completed ones.
    void watch(uint64_t ticket, EventPointer event);
    // Readable when tickets may have been completed; read it to reset.
    int eventfd() const;
    // (ticket, ok); not ok: the driver returned an error for it.
    std::vector<std::pair<uint64_t, bool>> completed();

  private:
    struct Work;
    std::unique_ptr<Work> work_;
};

}  // namespace kv::gpu
