// The plan of a job: which bytes of which buffer belong to which bytes of the arena.
//
// A shard's bytes in its slot are [run][region][block of the chunk][page_bytes], whatever the engine's strides are.
//
// The bytes of a job in the order of their copying are its *stream*: copy groups, in each its runs, in each the regions
// and blocks, the dimension with the larger stride in the buffer outside, so that a while of copying stays in one
// neighbourhood of the buffer (address translation, not bandwidth, is what small pages run out of). Blocks of a
// retrieve go in prefix order, blocks of a store by id: reads are what suffers from jumps, so the side that is read is
// read in order. Measured with 2 KiB pages, shuffled ids, 2 threads: 15 GB/s → 21 GB/s for a store, of 22 contiguous.
//
// Workers cut the stream into pieces of any size and expand only their own piece into copies: a 256 MiB job of 2 KiB
// pages has 131,072 of them, and a list of all would cost a tenth of the copying itself.

#pragma once

#include <cstdint>
#include <vector>

#include "copy/layout.h"

namespace kv {

enum class JobKind { STORE, RETRIEVE };

// Blocks of one group: block_ids[i] holds block first_block + i of the prefix. slots: the arena offset of the shard
// of each chunk that the blocks touch, SKIP = not this one.
struct CopyGroup {
    uint64_t group;
    uint64_t first_block;
    std::vector<int32_t> block_ids;
    std::vector<int64_t> slots;
};

constexpr int64_t SKIP = -1;

struct PageCopy {
    uint64_t buffer;
    uint64_t buffer_offset;
    uint64_t arena_offset;
    uint64_t bytes;
};

// Immutable once built; any number of threads may expand pieces of it. `layout` must outlive it.
class Plan {
  public:
    // Refusal("block-range" | "block-duplicate" | "slots"): nothing of a refused job may be copied.
    Plan(const Layout& layout, const std::vector<CopyGroup>& copy_groups, uint64_t arena_bytes, JobKind kind);

    // Length of the stream.
    uint64_t bytes() const { return bytes_; }

    // Where a piece that begins at `begin` ends: after `bytes_max` bytes, behind the last of `pages_max` pages that it
    // touches, or with the stream. Costs a few nanoseconds for each section that the piece runs through.
    uint64_t piece_end(uint64_t begin, uint64_t bytes_max, uint64_t pages_max) const;

    // Replaces `copies` by the copies of stream bytes [begin, end). Neighbours that are adjacent on both sides are one.
    void expand(uint64_t begin, uint64_t end, std::vector<PageCopy>& copies) const;

  private:
    struct Place {
        uint64_t slot;
        uint32_t in_chunk;
        int32_t block_id;
    };
    // A stretch of the stream: one run of one copy group.
    struct Section {
        const RegionRun* run;
        uint64_t first_place;
        uint64_t places;
        uint64_t run_offset;    // of the run in its slot
        uint64_t region_bytes;  // of a region in its slot
        uint64_t stream_begin;

        uint64_t stream_bytes() const { return places * run->regions * run->page_bytes; }
    };

    void add_places(const CopyGroup& copy, const Group& group, uint64_t arena_bytes);
    void sort_by_block(uint64_t first_place, uint64_t blocks);
    void add_sections(const Group& group, uint64_t first_place);
    std::vector<Section>::const_iterator section_at(uint64_t position) const;
    void expand_section(const Section& section, uint64_t begin, uint64_t end, std::vector<PageCopy>& copies) const;

    std::vector<Place> places_;
    std::vector<Section> sections_;
    uint64_t bytes_ = 0;
};

}  // namespace kv
