// Conversion of Python's lists and tuples of layouts and jobs, for all bindings of copy engines.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "base/completion_queue.h"
#include "copy/layout.h"
#include "copy/plan.h"

namespace kv {

using RunTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
using GroupTuples = std::vector<std::tuple<int64_t, int64_t, std::vector<RunTuple>>>;
using CopyGroupTuples = std::vector<std::tuple<int64_t, int64_t, nanobind::bytes, nanobind::bytes>>;

// Packed records from Python, copied so that they are aligned and outlive the GIL.
template <typename Record>
std::vector<Record> unpack(nanobind::bytes packed, const char* what) {
    if (packed.size() % sizeof(Record) != 0) {
        bad_argument(format("%s: %zu bytes must be a multiple of %zu", what, packed.size(), sizeof(Record)));
    }
    std::vector<Record> records(packed.size() / sizeof(Record));
    if (!records.empty()) std::memcpy(records.data(), packed.c_str(), packed.size());
    return records;
}

// Converts to unsigned. Negative numbers become too large ones, which the layout and the plan refuse.
constexpr uint64_t unsign(int64_t number) { return static_cast<uint64_t>(number); }

inline std::vector<Group> groups_from(const GroupTuples& tuples) {
    std::vector<Group> groups;
    for (const auto& [blocks_per_chunk, blocks, runs] : tuples) {
        Group& group = groups.emplace_back(Group{unsign(blocks_per_chunk), unsign(blocks), {}});
        for (const auto& [buffer, offset, regions, region_stride, block_stride, page_bytes] : runs) {
            group.runs.push_back({unsign(buffer), unsign(offset), unsign(regions), unsign(region_stride),
                                  unsign(block_stride), unsign(page_bytes)});
        }
    }
    return groups;
}

inline std::vector<CopyGroup> copy_groups_from(const CopyGroupTuples& tuples) {
    std::vector<CopyGroup> copy_groups;
    for (const auto& [group, first_block, block_ids, slots] : tuples) {
        copy_groups.push_back({unsign(group), unsign(first_block), unpack<int32_t>(block_ids, "block_ids"),
                               unpack<int64_t>(slots, "slots")});
    }
    return copy_groups;
}

inline JobKind kind_from(const std::string& kind) {
    if (kind == "store") return JobKind::STORE;
    if (kind == "retrieve") return JobKind::RETRIEVE;
    bad_argument("kind=" + kind + " must be store or retrieve");
}

inline nanobind::list completions_to(const std::vector<Completion>& completions) {
    nanobind::list list;
    for (const Completion& end : completions) {
        list.append(nanobind::make_tuple(end.subject, name_of(end.status), end.bytes, end.copy_ns, end.code,
                                         end.message, end.mode));
    }
    return list;
}

}  // namespace kv
