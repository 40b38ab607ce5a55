// Marks of chunks in remote stores (docs/remote-format.md): 64 bits each, of which the lowest two are a kind.
//
// kvserver/remote/announcement.py says what marks and kinds mean. One thread at a time may use an object.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/blake2b.h"

namespace kv {

// Makes the marks of a namespace's chunks under one epoch. Namespace and key together have at most 120 bytes.
class Marker {
  public:
    Marker(std::span<const std::byte> name_space, uint64_t epoch);

    // The mark of the chunk with that key, with a kind of 0.
    uint64_t of(std::span<const std::byte> key) const;

  private:
    Blake2bBlock block_{};  // begins with the namespace and the epoch
    size_t bytes_;
};

// A table of marks with kinds. Its size is fixed: a new mark takes the place of another one when all places in which it
// may lie are taken.
class MarkTable {
  public:
    // most: marks, a power of two and at least four.
    explicit MarkTable(size_t most);

    // Takes a mark with its kind, instead of the same mark with another kind. Returns the mark of another chunk whose
    // place it took; 0: of none.
    uint64_t put(uint64_t mark);

    // The kind with which a mark of kind 0 is there; 0: it is not there.
    uint64_t kind(uint64_t mark) const;

  private:
    size_t bucket(uint64_t mark) const { return ((mark >> 2) & last_bucket_) * WAYS; }

    static constexpr size_t WAYS = 4;  // places in which a mark may lie

    std::vector<uint64_t> marks_;
    uint64_t last_bucket_;
};

}  // namespace kv
