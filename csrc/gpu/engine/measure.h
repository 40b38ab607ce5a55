// How fast this device's link is, and from which length on copies need no packing.

#pragma once

#include <cstdint>

#include "gpu/driver/driver.h"

namespace kv::gpu {

// The shortest copies that, with all longer ones, go straight between KV pool and arena; never below 64 KiB.
struct DirectFrom {
    uint64_t staged_bytes = 0;  // instead of the client's packing: 98.5 % of the link, which staging reaches
    // Instead of ours, which takes turns with the engine's kernels: 97 %. Not less, because beside memory-bound work
    // scattered copies lose more than long ones: at 256 KiB, 94 % of an idle link, 81 % were left.
    uint64_t bare_bytes = 0;
};

struct LinkSpeed {
    double gbps = 0;  // 10^9 bytes a second, of one long copy
    DirectFrom direct_from;
};

struct Measured {
    LinkSpeed store;
    LinkSpeed retrieve;
};

// In the current device, with 64 MiB of pinned and of device memory (less when there is not enough). Waits, about 150
// ms.
Measured measure(const Driver& driver);

}  // namespace kv::gpu
