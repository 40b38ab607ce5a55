// The plan of a job: the mapping between bytes of its buffers and bytes of the arena.
//
// A shard's bytes in its slot are [run][region][block of the chunk][page_bytes], whatever the engine's strides are.
//
// The bytes of a job in the order of copying are its *stream*: copy groups, in each its runs, in each the regions and
// blocks. The dimension with the larger stride in the buffer is outside, so that copying stays in one neighbourhood of
// the buffer for a while (small pages are limited by address translation, not by bandwidth). Blocks of a retrieve go in
// prefix order, blocks of a store by id: jumps slow down reads, so the side that is read is read in order. Measured
// with 2 KiB pages, shuffled ids, 2 threads: 15 GB/s → 21 GB/s for a store, where a contiguous copy has 22 GB/s.
//
// A DMA needs no neighbourhood. Its stream may go shard after shard, each in the order of its bytes: then a part of a
// shard is complete long before the job is.
//
// Workers cut the stream into pieces of any size and expand only their own piece into copies. A 256 MiB job of 2 KiB
// pages has 131,072 copies, and a list of all would cost a tenth of the copying itself.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "copy/layout.h"

namespace kv {

enum class JobKind { STORE, RETRIEVE };

// Blocks of one group: block_ids[i] holds block first_block + i of the prefix. slots: the arena offset of the shard of
// each chunk that the blocks touch; SKIP: not this one. sums: of a retrieve with digests, the sum of each slot's whole
// payload (base/digest.h); NO_DIGEST: it is not known.
struct CopyGroup {
    uint64_t group;
    uint64_t first_block;
    std::vector<int32_t> block_ids;
    std::vector<int64_t> slots;
    std::vector<uint64_t> sums = {};
};

constexpr int64_t SKIP = -1;

// Calls visit(chunk, begin, end) for each chunk with a slot: blocks [begin, end) of the copy belong to it, and the
// first of them is block (first_block + begin) % blocks_per_chunk of the chunk.
template <typename Visit>
void visit_chunks(const CopyGroup& copy, uint64_t blocks_per_chunk, Visit visit) {
    const uint64_t lead = copy.first_block % blocks_per_chunk;  // blocks of the first chunk that come before ours
    for (uint64_t chunk = 0; chunk < copy.slots.size(); ++chunk) {
        if (copy.slots[chunk] == SKIP) continue;
        const uint64_t begin = std::max(chunk * blocks_per_chunk, lead) - lead;
        visit(chunk, begin, std::min((chunk + 1) * blocks_per_chunk - lead, copy.block_ids.size()));
    }
}

enum class StreamOrder {
    NEIGHBOURS,  // of the buffer
    SHARDS,      // in prefix order, and their bytes as they lie in the slots
};

struct PageCopy {
    uint64_t buffer;
    uint64_t buffer_offset;
    uint64_t arena_offset;
    uint64_t bytes;
    uint32_t shard;     // in the order of shard_sums.h
    uint64_t in_shard;  // offset in the shard's payload
};

// Bytes of a shard that a job leaves out.
struct ShardRest {
    uint32_t shard;
    uint64_t in_shard;
    uint64_t arena_offset;
    uint64_t bytes;
};

// Immutable once built; any number of threads may expand pieces of it. `layout` must outlive it.
class Plan {
  public:
    // by_shard: copies of two shards are never merged.
    // Refusal("block-range" | "block-duplicate" | "slots"): nothing of a refused job may be copied.
    Plan(const Layout& layout, const std::vector<CopyGroup>& copy_groups, uint64_t arena_bytes, JobKind kind,
         StreamOrder order = StreamOrder::NEIGHBOURS, bool by_shard = false);

    // Length of the stream.
    uint64_t bytes() const { return bytes_; }

    // The end of a piece that begins at `begin`: after `bytes_max` bytes, after the last of `pages_max` pages that it
    // touches, or at the end of the stream. Takes a few nanoseconds for each section of the piece.
    uint64_t piece_end(uint64_t begin, uint64_t bytes_max, uint64_t pages_max) const;

    // Replaces `copies` by the copies of stream bytes [begin, end). Copies that are adjacent on both sides are merged.
    void expand(uint64_t begin, uint64_t end, std::vector<PageCopy>& copies) const;

    // The bytes of the job's shards that are not in the stream: a retrieve may ask for some blocks of a chunk.
    const std::vector<ShardRest>& rests() const { return rests_; }

  private:
    struct Place {
        uint64_t slot;
        uint32_t in_chunk;
        int32_t block_id;
        uint32_t shard;
    };
    // A stretch of the stream: one run of one copy group, or of one shard.
    struct Section {
        const RegionRun* run;
        uint64_t first_place;
        uint64_t places;
        uint64_t run_offset;    // offset of the run in its slot
        uint64_t region_bytes;  // bytes of a region in its slot
        uint64_t stream_begin;

        uint64_t stream_bytes() const { return places * run->regions * run->page_bytes; }
    };

    void add_places(const CopyGroup& copy, const Group& group, uint64_t arena_bytes);
    void add_rests(const Group& group, uint64_t slot, uint32_t begin, uint32_t end);
    void add_copy(std::vector<PageCopy>& copies, const PageCopy& copy) const;
    void sort_by_block(uint64_t first_place, uint64_t blocks);
    void add_sections(const Group& group, uint64_t first_place, uint64_t end_place);
    void add_shards(const Group& group, uint64_t first_place);
    std::vector<Section>::const_iterator section_at(uint64_t position) const;
    void expand_section(const Section& section, uint64_t begin, uint64_t end, std::vector<PageCopy>& copies) const;

    std::vector<Place> places_;
    std::vector<Section> sections_;
    std::vector<ShardRest> rests_;
    uint64_t bytes_ = 0;
    uint32_t shards_ = 0;
    const StreamOrder order_;
    const bool by_shard_;
};

}  // namespace kv
