// The self-test of a device, before it is trusted with clients' memory.

#pragma once

#include <string>

#include "gpu/driver/driver.h"
#include "gpu/engine/link.h"
#include "gpu/kernels/kernels.h"

namespace kv::gpu {

// Stores and retrieves pages of odd sizes between scratch device memory and a scratch arena with the same kind of link,
// once packed by our kernels and once directly. Compares every byte and every sum, and flips a byte, which must be
// noticed. Uses the current device. Returns the problem, or "".
std::string self_test(const Driver& driver, const Kernels& kernels, const std::string& arena_reach);

}  // namespace kv::gpu
