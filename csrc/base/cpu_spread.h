// Keeps the busy workers of a pool on different processors.
//
// The scheduler prefers to wake a thread where it ran last. While few processors are free, it leaves two workers on one
// for ten milliseconds although another has become idle. On two processors a copy then often runs at half its speed. A
// worker that shares a processor with another worker asks to be moved, once per piece.
//
// A thread's configured affinity does not change.

#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

namespace kv {

class Spread {
  public:
    explicit Spread(size_t workers) : at_(workers) {
        for (auto& processor : at_) processor = IDLE;
    }

    // Called by worker `self` before a stretch of work, and leave() before it sleeps.
    void settle(size_t self);
    void leave(size_t self) { at_[self].store(IDLE, std::memory_order_relaxed); }

  private:
    static constexpr int IDLE = -1;

    bool alone(size_t self, int processor) const;
    void move(size_t self);

    std::vector<std::atomic<int>> at_;  // the processor of each worker; a hint, so nothing is ordered by it
};

}  // namespace kv
