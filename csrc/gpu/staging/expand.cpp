#include "gpu/staging/expand.h"

#include <algorithm>

namespace kv::gpu {
namespace {

constexpr uint64_t ceil_divide(uint64_t number, uint64_t divisor) { return (number + divisor - 1) / divisor; }

// Merges adjacent pages before they are cut into pieces.
class Joiner {
  public:
    explicit Joiner(std::vector<Piece>& pieces) : pieces_(pieces) {}

    void add(uint64_t pool, uint64_t staging, uint64_t bytes) {
        if (pool == pool_ + bytes_ && staging == staging_ + bytes_) {
            bytes_ += bytes;
            return;
        }
        flush();
        pool_ = pool, staging_ = staging, bytes_ = bytes;
    }

    // False if a piece had no room.
    bool flush() {
        for (uint64_t at = 0; at < bytes_; at += PIECE_BYTES_MAX) {
            if (pieces_.size() == PIECES_MAX) fits_ = false;
            if (!fits_) break;
            const uint64_t bytes = std::min<uint64_t>(PIECE_BYTES_MAX, bytes_ - at);
            pieces_.push_back({pool_ + at, static_cast<uint32_t>(staging_ + at), static_cast<uint32_t>(bytes)});
        }
        bytes_ = 0;
        return fits_;
    }

  private:
    std::vector<Piece>& pieces_;
    uint64_t pool_ = 0;
    uint64_t staging_ = 0;
    uint64_t bytes_ = 0;
    bool fits_ = true;
};

// The bytes [begin, end) of one region, counted from the region's begin in the shard.
struct RegionPart {
    uint64_t pool;  // device address of the region's block 0
    uint64_t begin;
    uint64_t end;
    uint64_t staging;  // of byte `begin`
};

void expand_region(const RegionRun& run, const ShardBlocks& shard, const RegionPart& part, Joiner& joiner) {
    const uint64_t wanted_begin = shard.first_in_chunk * run.page_bytes;
    const uint64_t wanted_end = wanted_begin + shard.block_ids.size() * run.page_bytes;
    const uint64_t end = std::min(part.end, wanted_end);
    uint64_t at = std::max(part.begin, wanted_begin);
    if (at >= end) return;
    // Only the first page may begin in its middle, so one division suffices for thousands of pages.
    const int32_t* block = &shard.block_ids[at / run.page_bytes - shard.first_in_chunk];
    for (uint64_t in_page = at % run.page_bytes; at < end; in_page = 0) {
        const uint64_t bytes = std::min(run.page_bytes - in_page, end - at);
        const uint64_t pool = part.pool + static_cast<uint64_t>(*block++) * run.block_stride + in_page;
        joiner.add(pool, part.staging + (at - part.begin), bytes);
        at += bytes;
    }
}

}  // namespace

bool expand(const Layout& layout, const ShardBlocks& shard, uint64_t begin, uint64_t end, uint32_t staging,
            std::span<const uint64_t> bases, std::vector<Piece>& pieces) {
    const Group& group = layout.groups()[shard.group];
    const size_t before = pieces.size();
    Joiner joiner(pieces);
    uint64_t run_begin = 0;
    for (const RegionRun& run : group.runs) {
        const uint64_t region_bytes = group.blocks_per_chunk * run.page_bytes;
        const uint64_t run_end = run_begin + run.regions * region_bytes;
        const uint64_t run_stop = std::min(end, run_end);
        for (uint64_t at = std::max(begin, run_begin); at < run_stop;) {
            const uint64_t region = (at - run_begin) / region_bytes;
            const uint64_t region_begin = run_begin + region * region_bytes;
            const uint64_t stop = std::min(run_stop, region_begin + region_bytes);
            const uint64_t pool = bases[run.buffer] + run.offset + region * run.region_stride;
            const uint64_t staged = staging + (at - begin);
            expand_region(run, shard, {pool, at - region_begin, stop - region_begin, staged}, joiner);
            at = stop;
        }
        run_begin = run_end;
    }
    if (joiner.flush()) return true;
    pieces.resize(before);
    return false;
}

uint64_t pieces_at_most(const Group& group, uint64_t begin, uint64_t end) {
    uint64_t pieces = 0;
    uint64_t run_begin = 0;
    for (const RegionRun& run : group.runs) {
        const uint64_t run_end = run_begin + run.regions * group.blocks_per_chunk * run.page_bytes;
        const uint64_t first = std::max(begin, run_begin);
        const uint64_t last = std::min(end, run_end);
        if (first < last) {
            // Pages of a run are adjacent in the shard, and merging never makes more pieces than single pages would.
            const uint64_t pages = (last - 1 - run_begin) / run.page_bytes - (first - run_begin) / run.page_bytes + 1;
            const uint64_t pieces_of_page = ceil_divide(run.page_bytes, PIECE_BYTES_MAX);
            pieces += std::min(pages * pieces_of_page, pages + (last - first) / PIECE_BYTES_MAX);
        }
        run_begin = run_end;
    }
    return pieces;
}

}  // namespace kv::gpu
