// Bytes that are a function of a seed: tests, replay and benchmarks fill pages with them and find every wrong byte.
//
// The stream of a seed is its 64-bit words w(0), w(1), … in little-endian order; a range starts at w(0). Streams of
// different seeds, and a stream against a shifted one, agree in a byte only by chance.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/shared_memory.h"

namespace kv {

struct PatternRange {
    uint64_t offset;
    uint64_t bytes;
    uint64_t seed;
};
static_assert(sizeof(PatternRange) == 24, "packed by the caller");

void write_pattern(std::byte* target, uint64_t bytes, uint64_t seed);
uint64_t count_wrong(const std::byte* source, uint64_t bytes, uint64_t seed);

// A mapped file whose ranges are filled and checked. bad_argument when a range leaves the mapping.
class Pattern {
  public:
    Pattern(int fd, uint64_t bytes);
    void fill(std::span<const PatternRange> ranges);
    uint64_t wrong(std::span<const PatternRange> ranges) const;

  private:
    void check(std::span<const PatternRange> ranges) const;

    Mapping mapping_;
};

}  // namespace kv
