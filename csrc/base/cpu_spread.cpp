#include "base/cpu_spread.h"

#include <sched.h>

namespace kv {

void Spread::settle(size_t self) {
    const int processor = ::sched_getcpu();
    at_[self].store(processor, std::memory_order_relaxed);
    if (processor >= 0 && !alone(self, processor)) move(self);
}

bool Spread::alone(size_t self, int processor) const {
    for (size_t other = 0; other < at_.size(); ++other) {
        if (other != self && at_[other].load(std::memory_order_relaxed) == processor) return false;
    }
    return true;
}

// Forbids the other workers' processors for a moment, which makes the kernel choose another one now. Does nothing when
// there are fewer processors than workers, or more than a cpu_set_t can name: then workers share.
void Spread::move(size_t self) {
    cpu_set_t allowed;
    if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    cpu_set_t elsewhere = allowed;
    for (const auto& processor : at_) {
        const int taken = processor.load(std::memory_order_relaxed);
        if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &elsewhere);
    }
    if (CPU_COUNT(&elsewhere) == 0) return;
    if (::sched_setaffinity(0, sizeof elsewhere, &elsewhere) == 0) ::sched_setaffinity(0, sizeof allowed, &allowed);
    at_[self].store(::sched_getcpu(), std::memory_order_relaxed);
}

}  // namespace kv
