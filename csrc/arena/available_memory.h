// How much memory this process may still take before the machine or its control group is full.

#pragma once

#include <cstdint>

namespace kv {

// The smaller of what the machine has available and what every limit of our control group (version 2) leaves. Page
// cache that can be dropped counts as available.
uint64_t available_memory_bytes();

}  // namespace kv
