// Expansion of a stretch of a shard into pieces: the mapping between bytes of the KV pool and bytes of staging.
//
// A shard's bytes are [run][region][block of the chunk][page_bytes] in its slot, and staging has them in the same
// order. Pure functions, used by the client's copier, and by the mover when it packs itself.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "copy/layout.h"
#include "gpu/kernels/piece.h"

namespace kv::gpu {

// One shard as a copy sees it: block_ids[i] holds block first_in_chunk + i of the chunk. A whole shard has
// first_in_chunk 0 and blocks_per_chunk ids.
struct ShardBlocks {
    uint32_t group;
    uint32_t first_in_chunk;
    std::span<const int32_t> block_ids;
};

// Appends the pieces of shard bytes [begin, end) that belong to those blocks; byte `begin` lies at offset `staging` of
// the segment, bytes of other blocks are left out. bases[i] = device address of buffer i. Pages that are adjacent on
// both sides are merged, then cut to PIECE_BYTES_MAX. The caller has checked group, ids and range.
// False, and nothing appended, when `pieces` would hold more than PIECES_MAX.
bool expand(const Layout& layout, const ShardBlocks& shard, uint64_t begin, uint64_t end, uint32_t staging,
            std::span<const uint64_t> bases, std::vector<Piece>& pieces);

// An upper bound of the pieces of any expansion of shard bytes [begin, end). Takes time proportional to the group's
// runs.
uint64_t pieces_at_most(const Group& group, uint64_t begin, uint64_t end);

}  // namespace kv::gpu
