#include "copy/shard_sums.h"

#include "base/check.h"

namespace kv {

ShardSums::ShardSums(const Layout& layout, const std::vector<CopyGroup>& copy_groups, JobKind kind) {
    for (const CopyGroup& copy : copy_groups) {
        const uint64_t bytes = layout.groups()[copy.group].shard_bytes;
        if (kind == JobKind::RETRIEVE && copy.sums.size() != copy.slots.size()) {
            throw Refusal("sums", format("%zu sums came for %zu slots", copy.sums.size(), copy.slots.size()));
        }
        for (size_t chunk = 0; chunk < copy.slots.size(); ++chunk) {
            if (copy.slots[chunk] == SKIP) continue;
            const uint64_t expected = kind == JobKind::RETRIEVE ? copy.sums[chunk] : 0;
            shards_.push_back({bytes, expected, expected != NO_DIGEST});
        }
    }
}

void ShardSums::add(uint32_t shard, const DigestSum& share) {
    DigestSum& found = shards_[shard].found;
    found = found + share;
}

std::optional<std::vector<uint64_t>> ShardSums::made() const {
    std::vector<uint64_t> sums;
    sums.reserve(shards_.size());
    for (const Shard& shard : shards_) {
        if (shard.found.bytes != shard.bytes) return std::nullopt;
        sums.push_back(shard.found.sum);
    }
    return sums;
}

std::vector<uint32_t> ShardSums::wrong() const {
    std::vector<uint32_t> wrong;
    for (uint32_t index = 0; index < shards_.size(); ++index) {
        const auto& [bytes, expected, wanted, found] = shards_[index];
        if (wanted && (found.bytes != bytes || found.sum != expected)) wrong.push_back(index);
    }
    return wrong;
}

}  // namespace kv
