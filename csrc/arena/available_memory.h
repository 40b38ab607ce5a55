// The memory that this process may still take before the machine or a control group is full.

#pragma once

#include <cstdint>

namespace kv {

// The minimum of the machine's available memory and of what each limit of our control groups (version 2) leaves. Page
// cache that can be dropped counts as available.
uint64_t available_memory_bytes();

}  // namespace kv
