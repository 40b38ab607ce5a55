// The list of a segment: which bytes of which shards it holds, and where. Written by the mover, read by the client.
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

constexpr uint64_t LIST_BYTES = 128 << 10;  // of one segment's list at most

// Shard bytes [begin, end) of those blocks, at offset `staging` of the segment.
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

// What a stretch of that many blocks takes of a list.
constexpr uint64_t stretch_list_bytes(uint64_t blocks) {
    return sizeof(StretchHead) + (blocks * sizeof(int32_t) + 7) / 8 * 8;
}

// Writes the list; its length is returned. The caller has seen to it that it fits.
uint32_t pack_stretches(std::span<const StagedStretch> stretches, std::span<std::byte> list);

// The stretches of a list that came from elsewhere; their ids point into it, so it must be 8-byte aligned and outlive
// them. Refusal("staging-list") when anything of it does not fit layout or segment: afterwards expand() may be called.
std::vector<StagedStretch> unpack_stretches(std::span<const std::byte> list, const Layout& layout,
                                            uint64_t segment_bytes);

}  // namespace kv::gpu
