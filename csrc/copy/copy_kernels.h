// Copies between mapped memory: many small ones or one long one, through the cache or past it.
//
// Non-temporal stores save reading the target's lines and keep the cache for others; they pay for copies that are
// larger than what a cache would keep anyway. The instructions are chosen once, by what the processor has.

#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace kv {

struct Copy {
    const std::byte* source;
    std::byte* target;
    size_t bytes;
};

enum class Through { CACHE, MEMORY };

// Runs the copies in order. On return all bytes are visible to other processors before any later store of this thread.
// Allocates and locks nothing (it runs under run_guarded).
void run_copies(std::span<const Copy> copies, Through through);

// What copies past the cache are made with: "non-temporal", or "memcpy" where we know nothing better.
std::string copy_variant();

// Seconds for one contiguous copy by `threads` threads between two files that are mapped and touched beforehand: the
// ceiling of every other copy.
double copy_seconds(int source_fd, int target_fd, size_t bytes, int threads, Through through);

}  // namespace kv
