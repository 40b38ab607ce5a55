// The sums of a job's shards (base/digest.h): shares of them come in any order, and the end judges.
//
// Shards are those with a slot, in the order of the job's groups and their slots. Not thread-safe.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/digest.h"
#include "copy/layout.h"
#include "copy/plan.h"

namespace kv {

class ShardSums {
  public:
    // The job was planned (Plan), so its groups fit the layout. Refusal("sums") unless a retrieve brings a sum for each
    // slot.
    ShardSums(const Layout& layout, const std::vector<CopyGroup>& copy_groups, JobKind kind);

    size_t shards() const { return shards_.size(); }
    // Whether its bytes have to be summed: all of a store, and those of a retrieve whose sum is known.
    bool wants(uint32_t shard) const { return shards_[shard].wanted; }
    void add(uint32_t shard, const DigestSum& share);

    // A store's sum of each shard. nullopt: some byte was not summed once.
    std::optional<std::vector<uint64_t>> made() const;
    // A retrieve's shards with another sum than expected.
    std::vector<uint32_t> wrong() const;

  private:
    struct Shard {
        uint64_t bytes;
        uint64_t expected;
        bool wanted;
        DigestSum found = {};
    };
    std::vector<Shard> shards_;
};

}  // namespace kv
