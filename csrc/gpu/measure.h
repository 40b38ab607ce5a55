// How fast this device's link is, and from which length on copies need no packing.

#pragma once

#include <cstdint>

#include "gpu/driver.h"

namespace kv::gpu {

struct LinkSpeed {
    double gbps = 0;  // 10^9 bytes a second, of one long copy
    // The shortest copies that, with all longer ones, reach 97 % of that; never below 64 KiB.
    uint64_t direct_from_bytes = 0;
};

struct Measured {
    LinkSpeed store;
    LinkSpeed retrieve;
};

// In the current device, with 64 MiB of pinned and of device memory (less when there is not enough). Waits, about 150
// ms.
Measured measure(const Driver& driver);

}  // namespace kv::gpu
