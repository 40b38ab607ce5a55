// Measurement of a device's link: its rate, and the length from which copies need no packing.

#pragma once

#include <cstdint>

#include "gpu/driver/driver.h"

namespace kv::gpu {

// Lengths from which copies go directly between KV pool and arena; never below 64 KiB.
struct DirectFrom {
    // In place of the client's packing: copies that reach 98.5 % of the link's rate, as staging does.
    uint64_t staged_bytes = 0;
    // In place of our packing, which takes turns with the engine's kernels: 97 %. Not less, because memory-bound work
    // slows down scattered copies more than long ones: at 256 KiB, with 94 % of an idle link, 81 % were left.
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

// Measures the current device, with 64 MiB of pinned and of device memory each (less when there is not enough). Waits
// about 150 ms.
Measured measure(const Driver& driver);

}  // namespace kv::gpu
