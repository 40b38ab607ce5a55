#include "disk/recovery_order.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"

namespace kv::disk {
namespace {

// Bytes of a chunk's name: its namespace and its key, which are adjacent in a record.
constexpr size_t NAME_BYTES = sizeof(LedgerRecord::namespace_digest) + sizeof(LedgerRecord::key);
static_assert(offsetof(LedgerRecord, key) ==
              offsetof(LedgerRecord, namespace_digest) + sizeof(LedgerRecord::namespace_digest));

using Name = std::array<std::byte, NAME_BYTES>;

Name name_of_parent(const LedgerRecord& shard) {
    Name name;
    std::ranges::copy(shard.namespace_digest, name.begin());
    std::ranges::copy(shard.parent, name.begin() + sizeof shard.namespace_digest);
    return name;
}

}  // namespace

RecoveryOrder::RecoveryOrder(std::vector<DiskRecord> records, size_t chunk_most)
    : records_(std::move(records)), chunk_most_(chunk_most) {
    if (records_.size() >= NONE) bad_argument("more records than can be told");
    if (chunk_most == 0) bad_argument("chunk_most=0 must be 1 at least");
    gather_chunks();
    link_children();
    table_ = {};
    name_namespaces();
}

std::span<const std::byte> RecoveryOrder::name_of(uint32_t record) const {
    const auto* shard = reinterpret_cast<const std::byte*>(&records_[record].shard);
    return {shard + offsetof(LedgerRecord, namespace_digest), NAME_BYTES};
}

uint32_t& RecoveryOrder::place_of(std::span<const std::byte> name) {
    const uint64_t mask = table_.size() - 1;
    for (uint64_t at = xxh3(name) & mask;; at = (at + 1) & mask) {
        uint32_t& chunk = table_[at];
        if (chunk == NONE || std::ranges::equal(name_of(chunks_[chunk].record), name)) return chunk;
    }
}

void RecoveryOrder::gather_chunks() {
    const auto count = static_cast<uint32_t>(records_.size());
    table_.assign(std::bit_ceil(uint64_t{count} * 2 + 1), NONE);
    same_chunk_.assign(count, NONE);
    for (uint32_t record = 0; record < count; ++record) {
        uint32_t& chunk = place_of(name_of(record));
        if (chunk == NONE) {
            chunk = static_cast<uint32_t>(chunks_.size());
            chunks_.push_back({record});
        } else {
            same_chunk_[record] = std::exchange(chunks_[chunk].record, record);
        }
    }
}

// The heads of chains become siblings of each other.
void RecoveryOrder::link_children() {
    uint32_t head = NONE;
    for (uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
        const uint32_t parent = place_of(name_of_parent(records_[chunks_[chunk].record].shard));
        uint32_t& first = parent == NONE ? head : chunks_[parent].child;
        chunks_[chunk].sibling = std::exchange(first, chunk);
    }
    if (head != NONE) pending_.push_back(head);
}

void RecoveryOrder::name_namespaces() {
    auto newest = namespaces_.end();  // most records are of the same namespace as the one before
    for (const auto& [shard, extent, device, stored_s] : records_) {
        if (newest == namespaces_.end() || newest->first != shard.namespace_digest) {
            newest = namespaces_.try_emplace(shard.namespace_digest, 0).first;
        }
        newest->second = std::max(newest->second, shard.generation);
    }
}

// The next chunk; NONE at the end.
uint32_t RecoveryOrder::take_next() {
    for (;;) {
        if (pending_.empty()) {  // the remaining chunks are in circles
            while (untold_from_ < chunks_.size() && chunks_[untold_from_].told) ++untold_from_;
            if (untold_from_ == chunks_.size()) return NONE;
            pending_.push_back(untold_from_);
        }
        const uint32_t chunk = pending_.back();
        pending_.pop_back();
        if (std::exchange(chunks_[chunk].told, true)) continue;
        if (chunks_[chunk].sibling != NONE) pending_.push_back(chunks_[chunk].sibling);
        if (chunks_[chunk].child != NONE) pending_.push_back(chunks_[chunk].child);
        return chunk;
    }
}

void RecoveryOrder::hold(uint32_t chunk) {
    for (uint32_t record = chunks_[chunk].record; record != NONE; record = same_chunk_[record]) held_.push_back(record);
    std::ranges::stable_sort(held_, std::ranges::greater{},
                             [this](uint32_t record) { return records_[record].shard.generation; });
    if (held_.size() > chunk_most_) held_.resize(chunk_most_);
}

std::vector<DiskRecord> RecoveryOrder::next(size_t most) {
    std::vector<DiskRecord> told;
    for (;;) {
        if (held_.empty()) {
            const uint32_t chunk = take_next();
            if (chunk == NONE) return told;
            hold(chunk);
        }
        if (!told.empty() && told.size() + held_.size() > most) return told;
        for (const uint32_t record : held_) told.push_back(records_[record]);
        held_.clear();
    }
}

}  // namespace kv::disk
