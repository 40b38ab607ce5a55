// The records of all devices in an order in which an index can insert them without a table of unseen parents.
//
// The records of a chunk come together, the newest first. A chunk comes after its parent, and its descendants follow
// before any other chunk. Chunks whose parent has no record, or whose chain is a circle, come as well: the receiver
// decides about them.
//
// Threads: one at a time.

#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "disk/format.h"

namespace kv::disk {

class RecoveryOrder {
  public:
    // A chunk has at most its `chunk_most` newest records. Takes about 24 bytes per record in addition to the records.
    // bad_argument for 2^32 - 1 records or more.
    RecoveryOrder(std::vector<DiskRecord> records, size_t chunk_most);

    // Namespaces that have records, each with the newest generation of its records.
    const std::map<Digest, uint64_t>& namespaces() const { return namespaces_; }
    size_t records() const { return records_.size(); }

    // The records of the next whole chunks, `most` at most, but of one chunk at least. Empty at the end.
    std::vector<DiskRecord> next(size_t most);

  private:
    static constexpr uint32_t NONE = UINT32_MAX;

    struct Chunk {
        uint32_t record;  // one of its records, the head of the list in same_chunk_
        uint32_t child = NONE;
        uint32_t sibling = NONE;
        bool told = false;
    };

    void gather_chunks();
    void link_children();
    void name_namespaces();
    // The chunk of this name, or the free place in the table where it belongs.
    uint32_t& place_of(std::span<const std::byte> name);
    std::span<const std::byte> name_of(uint32_t record) const;
    uint32_t take_next();
    void hold(uint32_t chunk);

    const std::vector<DiskRecord> records_;
    const size_t chunk_most_;
    std::map<Digest, uint64_t> namespaces_;
    std::vector<uint32_t> same_chunk_;  // record -> the next record of its chunk
    std::vector<Chunk> chunks_;
    std::vector<uint32_t> table_;    // by hash of the name -> chunk
    std::vector<uint32_t> pending_;  // chunks whose siblings, children and selves are next, the last one first
    uint32_t untold_from_ = 0;       // all chunks before it were returned
    std::vector<uint32_t> held_;     // records of the next chunk, which did not fit into the last result
};

}  // namespace kv::disk
