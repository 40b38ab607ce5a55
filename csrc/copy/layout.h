// The places of a cache's pages: a checked affine map (region, block) → bytes of a buffer.
//
// Page (r, b) of a run is at offset + r * region_stride + b * block_stride of its buffer and page_bytes long. Once a
// Layout exists, every page of every block id in [0, blocks) lies inside its buffer.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kv {

// Larger sizes, offsets and strides are refused; products of two of them fit 128 bits, sums fit 64.
constexpr uint64_t LAYOUT_BYTES_MAX = uint64_t{1} << 50;
constexpr uint64_t REGIONS_MAX = uint64_t{1} << 20;
constexpr uint64_t BLOCKS_MAX = uint64_t{1} << 31;  // block ids are int32

struct RegionRun {
    uint64_t buffer;
    uint64_t offset;
    uint64_t regions;
    uint64_t region_stride;
    uint64_t block_stride;
    uint64_t page_bytes;
};

struct Group {
    uint64_t blocks_per_chunk;
    uint64_t blocks;
    std::vector<RegionRun> runs;
    uint64_t block_bytes = 0;  // one block in all regions; set by Layout
    uint64_t shard_bytes = 0;  // a whole chunk; set by Layout
};

class Layout {
  public:
    // Refusal("layout") when a count is 0, a number is too large, or a page exceeds its buffer.
    Layout(std::vector<Group> groups, std::span<const uint64_t> buffer_bytes);
    const std::vector<Group>& groups() const { return groups_; }

  private:
    std::vector<Group> groups_;
};

}  // namespace kv
