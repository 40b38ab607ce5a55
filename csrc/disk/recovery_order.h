// The records of all devices in the order in which an index can take them in, so that it needs no table of its own for
// what it has not yet seen: the records of a chunk together, the newest first; a chunk after its parent, and what is
// below it before anything else. Where the parent has no record, or a chain bites its tail, a chunk is told all the
// same: whoever listens decides.
//
// Threads: one at a time.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "disk/format.h"

namespace kv::disk {

class Telling {
  public:
    struct Namespace {
        std::array<std::byte, 32> digest;
        uint64_t newest;  // generation of its records
    };

    // Of a chunk that has more than `chunk_most` records, its newest ones are told. Takes some 24 bytes a record beside
    // the records. bad_argument for 2^32 - 1 records or more.
    Telling(std::vector<DiskRecord> records, size_t chunk_most);

    // Ascending by digest.
    const std::vector<Namespace>& namespaces() const { return namespaces_; }
    size_t records() const { return records_.size(); }

    // The next chunks, whole: as many as have `most` records together, but one at least. Empty when all were told.
    std::vector<DiskRecord> next(size_t most);

  private:
    static constexpr uint32_t NONE = UINT32_MAX;

    struct Chunk {
        uint32_t record;  // one of its records: the others hang on it
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
    std::vector<Namespace> namespaces_;
    std::vector<uint32_t> same_chunk_;  // record -> the next record of its chunk
    std::vector<Chunk> chunks_;
    std::vector<uint32_t> table_;    // by hash of the name -> chunk
    std::vector<uint32_t> pending_;  // chunks whose siblings, children and selves are next, the last one first
    uint32_t untold_from_ = 0;       // all chunks before it were told
    std::vector<uint32_t> held_;     // records of the next chunk, when it did not fit any more
};

}  // namespace kv::disk
