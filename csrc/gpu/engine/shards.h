// A job as the link sees it: whole shards, cut into what fits a segment of staging.
//
// A shard is contiguous in its slot, so staging holds the bytes of a job in the order of the slots and a DMA carries
// stretches of MiBs. Only the packing between staging and the KV pool knows pages. A retrieve of a part of a chunk
// brings the whole shard and scatters the blocks that were asked for.

#pragma once

#include <cstdint>
#include <vector>

#include "copy/layout.h"
#include "copy/plan.h"
#include "gpu/staging/expand.h"

namespace kv::gpu {

struct Shard {
    uint32_t group;
    uint32_t first_in_chunk;  // block_ids[i] is block first_in_chunk + i of the chunk
    uint64_t arena_offset;
    std::vector<int32_t> block_ids;
    uint64_t bytes;  // of the whole shard
};

// The shards of a job in prefix order, without the chunks to skip. Immutable.
class ShardPlan {
  public:
    // Refuses what Plan refuses, and Refusal("slots") for a store of a part of a chunk: the rest of its slot would be
    // written with what staging happens to hold.
    ShardPlan(const Layout& layout, const std::vector<CopyGroup>& copy_groups, uint64_t arena_bytes, JobKind kind);

    const std::vector<Shard>& shards() const { return shards_; }
    // Of whole shards: what crosses the link.
    uint64_t bytes() const { return bytes_; }
    // Of the blocks that were asked for.
    uint64_t page_bytes() const { return page_bytes_; }
    // Mean length of the copies that the job would be without staging: pages, and neighbours that are adjacent on both
    // sides as one. 0 for a job of nothing.
    uint64_t mean_copy_bytes() const { return copies_ == 0 ? 0 : page_bytes_ / copies_; }

  private:
    void add_shards(const Group& group, const CopyGroup& copy, JobKind kind);
    void count_copies(const Group& group, const Shard& shard);

    std::vector<Shard> shards_;
    uint64_t bytes_ = 0;
    uint64_t page_bytes_ = 0;
    uint64_t copies_ = 0;
};

// Bytes [begin, end) of a shard, at `staging` of the segment.
struct SegmentPart {
    uint32_t shard;
    uint64_t begin;
    uint64_t end;
    uint32_t staging;
};

// What a segment can take.
struct SegmentLimits {
    uint64_t bytes;
    uint64_t pieces;
    uint64_t list_bytes;  // of what is asked of a client: a head and block ids for each part
};

// Cuts a plan into segments, front to back. Parts begin and end at multiples of 4096 bytes of their shard, or with it,
// and begin at multiples of 16 bytes of the segment.
//
// The packing of the first segment of a store, and of the last one of a retrieve, is time in which the link has nothing
// to do. So a job of several segments begins (ends) with small ones, unless there are others that use the link then.
class Cutter {
  public:
    // `plan` and `layout` must outlive it. Limits must allow a part of 4096 bytes of any shard.
    Cutter(const ShardPlan& plan, const Layout& layout, SegmentLimits limits, JobKind kind);

    bool finished() const { return shard_ == plan_.shards().size(); }
    // `alone`: no other job is there that could use the same segments.
    std::vector<SegmentPart> next(bool alone);

  private:
    uint64_t bytes_of_next(bool alone) const;
    uint64_t end_within(const Shard& shard, uint64_t bytes, uint64_t pieces) const;

    const ShardPlan& plan_;
    const Layout& layout_;
    const SegmentLimits limits_;
    const JobKind kind_;
    uint64_t segments_ = 0;  // cut so far
    uint64_t bytes_left_;
    size_t shard_ = 0;
    uint64_t begin_ = 0;  // of the next part in its shard
};

}  // namespace kv::gpu
