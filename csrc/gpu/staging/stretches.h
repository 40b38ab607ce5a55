// The list of a segment: the shards' bytes that it contains, with their offsets. Written by the mover, read by the
// client.
//
// Packed back to back: StretchHead, its block ids (int32), padding to 8 bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/layout.h"
#include "gpu/staging/expand.h"

namespace kv::gpu {

constexpr uint64_t LIST_BYTES = 128 << 10;  // largest list of one segment

// Bytes [begin, end) of a shard's blocks, at offset `staging` of the segment.
struct StagedStretch {
    ShardBlocks shard;
    uint32_t staging;
    uint64_t begin;
    uint64_t end;
};

struct StretchHead {
    uint32_t group;
    uint32_t first_in_chunk;
    uint32_t blocks;
    uint32_t staging;
    uint64_t begin;
    uint64_t end;
};
static_assert(sizeof(StretchHead) == 32);

// Bytes that a stretch of that many blocks takes in a list.
constexpr uint64_t stretch_list_bytes(uint64_t blocks) {
    return sizeof(StretchHead) + (blocks * sizeof(int32_t) + 7) / 8 * 8;
}

constexpr uint64_t STRETCHES_MAX = LIST_BYTES / stretch_list_bytes(1);  // of one list

// Writes the list and returns its length. The caller has made sure that it fits.
uint32_t pack_stretches(std::span<const StagedStretch> stretches, std::span<std::byte> list);

// The checked stretches of an untrusted list. Their ids point into it, so it must be 8-byte aligned and outlive them.
// Refusal("staging-list") when any stretch does not fit layout or segment. expand() may be called with the result.
std::vector<StagedStretch> unpack_stretches(std::span<const std::byte> list, const Layout& layout,
                                            uint64_t segment_bytes);

}  // namespace kv::gpu
