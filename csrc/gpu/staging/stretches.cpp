#include "gpu/staging/stretches.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/check.h"

namespace kv::gpu {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Refusal("staging-list", message); }

void check(const StretchHead& head, const Layout& layout, uint64_t segment_bytes) {
    if (head.group >= layout.groups().size()) refuse(format("there is no group %u", head.group));
    const Group& group = layout.groups()[head.group];
    if (head.blocks == 0 || uint64_t{head.first_in_chunk} + head.blocks > group.blocks_per_chunk) {
        refuse(format("blocks %u + %u leave a chunk of %" PRIu64, head.first_in_chunk, head.blocks,
                      group.blocks_per_chunk));
    }
    if (head.begin >= head.end || head.end > group.shard_bytes) {
        refuse(format("bytes [%" PRIu64 ", %" PRIu64 ") leave a shard of %" PRIu64, head.begin, head.end,
                      group.shard_bytes));
    }
    if (head.staging > segment_bytes || head.end - head.begin > segment_bytes - head.staging) {
        refuse(format("%" PRIu64 " bytes at %u leave a segment of %" PRIu64, head.end - head.begin, head.staging,
                      segment_bytes));
    }
}

std::span<const int32_t> checked_ids(const std::byte* packed, uint32_t count, const Group& group) {
    const std::span<const int32_t> ids(reinterpret_cast<const int32_t*>(packed), count);
    for (const int32_t id : ids) {
        if (id < 0 || static_cast<uint64_t>(id) >= group.blocks) {
            refuse(format("block %d is not in [0, %" PRIu64 ")", id, group.blocks));
        }
    }
    return ids;
}

}  // namespace

uint32_t pack_stretches(std::span<const StagedStretch> stretches, std::span<std::byte> list) {
    uint64_t at = 0;
    for (const StagedStretch& stretch : stretches) {
        const auto& [group, first_in_chunk, block_ids] = stretch.shard;
        const auto blocks = static_cast<uint32_t>(block_ids.size());
        const uint64_t bytes = stretch_list_bytes(blocks);
        KV_ASSERT(bytes <= list.size() - at);
        const StretchHead head{group, first_in_chunk, blocks, stretch.staging, stretch.begin, stretch.end};
        std::memcpy(&list[at], &head, sizeof head);
        std::ranges::copy(std::as_bytes(block_ids), &list[at] + sizeof head);  // perhaps none
        at += bytes;
    }
    return static_cast<uint32_t>(at);
}

std::vector<StagedStretch> unpack_stretches(std::span<const std::byte> list, const Layout& layout,
                                            uint64_t segment_bytes) {
    if (list.empty()) refuse("the list is empty");
    std::vector<StagedStretch> stretches;
    for (uint64_t at = 0; at < list.size();) {
        StretchHead head;
        if (list.size() - at < sizeof head) refuse("the list is cut off");
        std::memcpy(&head, &list[at], sizeof head);
        check(head, layout, segment_bytes);
        const uint64_t bytes = stretch_list_bytes(head.blocks);
        if (list.size() - at < bytes) refuse("the list is cut off");
        const auto ids = checked_ids(&list[at] + sizeof head, head.blocks, layout.groups()[head.group]);
        stretches.push_back({{head.group, head.first_in_chunk, ids}, head.staging, head.begin, head.end});
        at += bytes;
    }
    return stretches;
}

}  // namespace kv::gpu
