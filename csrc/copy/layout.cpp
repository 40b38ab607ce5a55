#include "copy/layout.h"

#include <cinttypes>
#include <utility>

#include "base/check.h"

namespace kv {
namespace {

void require(const char* name, uint64_t value, uint64_t least, uint64_t most) {
    if (value >= least && value <= most) return;
    // Printed as signed, so that -1 does not read as 2^64 - 1.
    throw Refusal("layout", format("%s=%" PRId64 " must be in [%" PRIu64 ", %" PRIu64 "]", name,
                                   static_cast<int64_t>(value), least, most));
}

void check_run(const RegionRun& run, uint64_t blocks, std::span<const uint64_t> buffer_bytes) {
    if (buffer_bytes.empty()) throw Refusal("layout", "a cache without buffers has no regions");
    require("buffer", run.buffer, 0, buffer_bytes.size() - 1);
    require("offset", run.offset, 0, LAYOUT_BYTES_MAX);
    require("regions", run.regions, 1, REGIONS_MAX);
    require("region_stride", run.region_stride, 0, LAYOUT_BYTES_MAX);
    require("block_stride", run.block_stride, 0, LAYOUT_BYTES_MAX);
    require("page_bytes", run.page_bytes, 1, LAYOUT_BYTES_MAX);
    using Wide = unsigned __int128;
    const Wide end = Wide{run.offset} + Wide{run.regions - 1} * run.region_stride +
                     Wide{blocks - 1} * run.block_stride + run.page_bytes;
    const uint64_t available = buffer_bytes[run.buffer];
    if (end <= available) return;
    throw Refusal("layout",
                  format("the last page ends %" PRIu64 " bytes behind buffer %" PRIu64 " of %" PRIu64 " bytes",
                         static_cast<uint64_t>(end - available), run.buffer, available));
}

}  // namespace

Layout::Layout(std::vector<Group> groups, std::span<const uint64_t> buffer_bytes) : groups_(std::move(groups)) {
    for (Group& group : groups_) {
        require("blocks", group.blocks, 1, BLOCKS_MAX);
        require("blocks_per_chunk", group.blocks_per_chunk, 1, BLOCKS_MAX);
        require("runs", group.runs.size(), 1, REGIONS_MAX);
        unsigned __int128 block_bytes = 0;
        for (const RegionRun& run : group.runs) {
            check_run(run, group.blocks, buffer_bytes);
            block_bytes += static_cast<unsigned __int128>(run.regions) * run.page_bytes;
        }
        const auto shard_bytes = block_bytes * group.blocks_per_chunk;
        if (shard_bytes > LAYOUT_BYTES_MAX) throw Refusal("layout", "a chunk's shard is larger than 2^50 bytes");
        group.block_bytes = static_cast<uint64_t>(block_bytes);
        group.shard_bytes = static_cast<uint64_t>(shard_bytes);
    }
}

}  // namespace kv
