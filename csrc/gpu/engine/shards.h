// A job as the link sees it: whole shards, cut into parts that fit a segment of staging.
//
// A shard is contiguous in its slot, so staging has the bytes of a job in the order of the slots, and a DMA copies
// several MiB at once. Only the packing between staging and the KV pool knows pages. A retrieve of a part of a chunk
// copies the whole shard and scatters the blocks that were asked for.

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
    // Refusals as in Plan, and Refusal("slots") for a store of a part of a chunk: the rest of its slot would get stale
    // bytes of the staging memory.
    ShardPlan(const Layout& layout, const std::vector<CopyGroup>& copy_groups, uint64_t arena_bytes, JobKind kind);

    const std::vector<Shard>& shards() const { return shards_; }
    // Bytes of whole shards, which cross the link.
    uint64_t bytes() const { return bytes_; }
    // Bytes of the blocks that were asked for.
    uint64_t page_bytes() const { return page_bytes_; }
    // Mean length of the copies that the job would have without staging: pages, merged where they are adjacent on both
    // sides. 0 for an empty job.
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

// Bounds of one segment.
struct SegmentLimits {
    uint64_t bytes;
    uint64_t pieces;
    uint64_t list_bytes;  // of the list for a client: a head and block ids for each part
    uint64_t parts = UINT64_MAX;
};

// Cuts a plan into segments, front to back. Parts begin and end at multiples of 4096 bytes of their shard, or with it,
// and begin at multiples of 16 bytes of the segment.
//
// While the first segment of a store or the last one of a retrieve is packed, the link is idle. So a job of several
// segments begins (ends) with small ones, unless other jobs use the link meanwhile.
class Cutter {
  public:
    // `plan` and `layout` must outlive it. Limits must allow a part of 4096 bytes of any shard.
    Cutter(const ShardPlan& plan, const Layout& layout, SegmentLimits limits, JobKind kind);

    bool finished() const { return shard_ == plan_.shards().size(); }
    // `alone`: there is no other job that could use the same segments.
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
    uint64_t begin_ = 0;  // offset of the next part in its shard
};

}  // namespace kv::gpu
