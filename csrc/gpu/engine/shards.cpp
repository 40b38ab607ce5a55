#include "gpu/engine/shards.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <span>

#include "base/check.h"
#include "base/shared_memory.h"
#include "gpu/staging/stretches.h"

namespace kv::gpu {
namespace {

constexpr uint64_t STAGING_ALIGN = 16;  // the kernels' widest load
constexpr uint64_t CUT_ALIGN = SLOT_ALIGN;
static_assert(CUT_ALIGN % STAGING_ALIGN == 0, "a part is as aligned in its segment as in its shard");

// The first (last) segments of a job have the size of a whole one divided by these.
constexpr std::array<uint64_t, 3> RAMP_DIVISORS{8, 4, 2};

constexpr uint64_t round_up(uint64_t number, uint64_t multiple) {
    return (number + multiple - 1) / multiple * multiple;
}

}  // namespace

// ------------------------------------------------------------------ ShardPlan

ShardPlan::ShardPlan(const Layout& layout, const std::vector<CopyGroup>& copy_groups, uint64_t arena_bytes,
                     JobKind kind) {
    const Plan judge(layout, copy_groups, arena_bytes, kind);
    page_bytes_ = judge.bytes();
    for (const CopyGroup& copy : copy_groups) add_shards(layout.groups()[copy.group], copy, kind);
}

void ShardPlan::add_shards(const Group& group, const CopyGroup& copy, JobKind kind) {
    const uint64_t per_chunk = group.blocks_per_chunk;
    visit_chunks(copy, per_chunk, [&](uint64_t chunk, uint64_t begin, uint64_t end) {
        if (kind == JobKind::STORE && end - begin != per_chunk) {
            throw Refusal("slots", format("%" PRIu64 " of %" PRIu64 " blocks of a chunk came to be stored", end - begin,
                                          per_chunk));
        }
        const std::span<const int32_t> ids = std::span(copy.block_ids).subspan(begin, end - begin);
        Shard& shard = shards_.emplace_back();
        shard.group = static_cast<uint32_t>(copy.group);
        shard.first_in_chunk = static_cast<uint32_t>((copy.first_block + begin) % per_chunk);
        shard.arena_offset = static_cast<uint64_t>(copy.slots[chunk]);
        shard.block_ids.assign(ids.begin(), ids.end());
        shard.bytes = group.shard_bytes;
        bytes_ += shard.bytes;
        count_copies(group, shard);
    });
}

void ShardPlan::count_copies(const Group& group, const Shard& shard) {
    uint64_t jumps = 1;  // stretches of consecutive ids
    for (size_t i = 1; i < shard.block_ids.size(); ++i) jumps += shard.block_ids[i] != shard.block_ids[i - 1] + 1;
    for (const RegionRun& run : group.runs) {
        const bool blocks_adjacent = run.block_stride == run.page_bytes;
        copies_ += run.regions * (blocks_adjacent ? jumps : shard.block_ids.size());
    }
}

// ------------------------------------------------------------------ Cutter

Cutter::Cutter(const ShardPlan& plan, const Layout& layout, SegmentLimits limits, JobKind kind)
    : plan_(plan), layout_(layout), limits_(limits), kind_(kind), bytes_left_(plan.bytes()) {
    KV_ASSERT(limits.bytes >= CUT_ALIGN);
    KV_ASSERT(limits.pieces >= CUT_ALIGN);
}

std::vector<SegmentPart> Cutter::next(bool alone) {
    KV_ASSERT(!finished());
    const uint64_t room = bytes_of_next(alone);
    uint64_t pieces = limits_.pieces, list = limits_.list_bytes, at = 0;
    std::vector<SegmentPart> parts;
    while (!finished()) {
        const Shard& shard = plan_.shards()[shard_];
        const uint64_t list_bytes = stretch_list_bytes(shard.block_ids.size());
        if (list_bytes > list || parts.size() == limits_.parts) break;
        const uint64_t end = end_within(shard, room - std::min(at, room), pieces);
        if (end == begin_) break;
        parts.push_back({static_cast<uint32_t>(shard_), begin_, end, static_cast<uint32_t>(at)});
        pieces -= pieces_at_most(layout_.groups()[shard.group], begin_, end);
        list -= list_bytes;
        bytes_left_ -= end - begin_;
        at = round_up(at + end - begin_, STAGING_ALIGN);
        begin_ = end;
        if (end == shard.bytes) ++shard_, begin_ = 0;
    }
    KV_ASSERT(!parts.empty());
    ++segments_;
    return parts;
}

uint64_t Cutter::bytes_of_next(bool alone) const {
    uint64_t bytes = limits_.bytes;
    if (alone && plan_.bytes() > limits_.bytes) {
        if (kind_ == JobKind::STORE) {
            if (segments_ < RAMP_DIVISORS.size()) bytes /= RAMP_DIVISORS[segments_];
        } else {
            const uint64_t least = limits_.bytes / RAMP_DIVISORS.front();
            bytes = std::clamp(bytes_left_ / 2, least, limits_.bytes);
        }
    }
    return std::max(round_up(bytes, CUT_ALIGN), CUT_ALIGN);
}

// The end of a part of the shard that begins at begin_, within the limits of bytes and pieces. begin_: no part fits.
uint64_t Cutter::end_within(const Shard& shard, uint64_t bytes, uint64_t pieces) const {
    const Group& group = layout_.groups()[shard.group];
    const auto fits = [&](uint64_t end) { return pieces_at_most(group, begin_, end) <= pieces; };
    if (shard.bytes - begin_ <= bytes && fits(shard.bytes)) return shard.bytes;
    uint64_t low = 0, high = std::min(bytes, shard.bytes - begin_ - 1) / CUT_ALIGN;  // in units of CUT_ALIGN
    while (low < high) {
        const uint64_t middle = (low + high + 1) / 2;
        if (fits(begin_ + middle * CUT_ALIGN)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return begin_ + low * CUT_ALIGN;
}

}  // namespace kv::gpu
