// Copies between mapped memory: many small ones or one long one, through the cache or past it.
//
// Non-temporal stores avoid reading the target's lines and keep the cache for others; they pay off for copies that are
// larger than a cache would keep. The instructions are chosen once, by what the processor has.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/copies.h"

namespace kv {

// Runs the copies in order. On return all bytes are visible to other processors before any later store of this thread.
// Allocates and locks nothing (it runs under run_guarded).
void run_copies(std::span<const Copy> copies, Through through);

// The same, and sums each copy's bytes into its place of `sums` (base/digest.h), from the loads that the copy makes
// anyway. target = null: the bytes are only summed. prepare_digest() was called for the payloads.
void run_summed_copies(std::span<const Copy> copies, std::span<uint64_t> sums, Through through);

// The kind of copies past the cache: "non-temporal", or "memcpy" if we have nothing better for the processor.
std::string copy_variant();

// Seconds for one contiguous copy by `threads` threads between two files that are mapped and touched beforehand: the
// upper bound for every other copy's rate.
double copy_seconds(int source_fd, int target_fd, size_t bytes, int threads, Through through);

}  // namespace kv
