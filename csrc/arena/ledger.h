// What the arena holds, in a memfd beside it: the index can be rebuilt from it after the brain died.
//
// The file: a header page; NAMESPACES_MAX namespace documents; one 128-byte entry for each place where a slot can start
// (arena offset / SLOT_ALIGN). It is sparse: only pages with entries take memory, at most 1/32 of the arena.
//
// One writer, which may be killed at any instruction. Entry, document and header each have a *seal*, a 64-bit word
// that holds the checksum of everything else and of the place. It is set by one release store after the rest was
// written, and withdrawn by one before anything else is touched. So a reader finds the old truth or none; what a wild
// write leaves fails the checksum.
//
// While no server runs, the seal of an entry may hold the sum of its slot's payload as well (arena/arena_sums.h). Such
// an entry is SUMMED, and no reader takes it for sealed before somebody has compared it with its bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/shared_memory.h"

namespace kv {

// A sealed shard, as Python packs it. What lies in the ledger and on disk has the same fields in places of its own,
// since neither may change with this one, nor with the other: so they are copied one by one, in arena/ledger.cpp and
// disk/format.cpp.
struct LedgerRecord {
    int64_t arena_offset;
    std::byte namespace_digest[32];
    std::byte key[32];
    std::byte parent[32];
    uint16_t group;
    uint16_t shard;
    uint32_t payload_bytes;
    uint32_t tenant;
    uint32_t slot_units;  // of SLOT_ALIGN bytes
    uint64_t generation;
};
static_assert(sizeof(LedgerRecord) == 128, "no padding: records are packed");

class Ledger {
  public:
    static constexpr uint64_t NAMESPACES_MAX = 256;
    static constexpr uint64_t DOCUMENT_BYTES_MAX = 65536;

    static uint64_t file_bytes(uint64_t arena_bytes);

    // bad_argument when the file has another size, or a header that disagrees; nothing is changed then.
    Ledger(int fd, uint64_t arena_bytes);

    // Publishes records, all or (bad_argument) none: a place must be in range, free, and come once.
    void seal(std::span<const LedgerRecord> records);
    // Withdraws entries; when it returns, no reader finds them. Free places are left alone.
    void clear(std::span<const int64_t> arena_offsets);
    // All valid entries, ascending by offset. Damaged ones, and SUMMED ones, are withdrawn and counted.
    std::vector<LedgerRecord> scan();
    uint64_t damaged() const { return damaged_; }

    void put_namespace(uint64_t index, std::span<const std::byte> document);
    void drop_namespace(uint64_t index);
    // Gives this process's page tables of the file back, so that what was written long ago does not count as its
    // memory. The file keeps its content; the next access to a page costs a minor fault.
    void forget_pages();
    std::vector<std::pair<uint64_t, std::string>> namespaces();

    enum class Seal : uint8_t { PLAIN = 0xa5, SUMMED = 0x5a };
    // Entries with that seal, ascending by offset. PLAIN: the valid ones. SUMMED: as they stand, since only the bytes
    // of a slot can tell whether its entry is right. Withdraws and counts nothing.
    std::vector<LedgerRecord> entries(Seal seal);
    // PLAIN becomes SUMMED, by one store: a writer that is killed leaves the one or the other. Entries of different
    // places may be changed by different threads.
    void put_sum(int64_t arena_offset, uint64_t sum);
    // SUMMED becomes PLAIN; false when entry, place or sum are not what they were: then it stays as it is.
    bool take_sum(int64_t arena_offset, uint64_t sum);

  private:
    struct Header;
    struct Entry;
    struct Document;

    Entry& entry_of(int64_t arena_offset) const;
    Document& document_at(uint64_t index) const;
    bool is_valid(const LedgerRecord& record) const;
    template <typename Visit>
    void visit_extents(uint64_t from, uint64_t to, Visit visit);
    // Calls visit(entry, record) for what is not free.
    template <typename Visit>
    void visit_entries(Visit visit);
    void read_document(uint64_t index, std::vector<std::pair<uint64_t, std::string>>& documents);

    uint64_t arena_bytes_;
    Descriptor file_;
    Mapping mapping_;
    uint64_t damaged_ = 0;
};

}  // namespace kv
