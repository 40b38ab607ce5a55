// The ledger: the arena's content, described in a memfd beside it. The index can be rebuilt from it after a brain died.
//
// The file: a header page; NAMESPACES_MAX namespace documents; one 128-byte entry for each place where a slot can start
// (arena offset / SLOT_ALIGN). It is sparse: only pages with entries take memory, at most 1/32 of the arena.
//
// One writer, which may be killed at any instruction. Entry, document and header each have a *seal*, a 64-bit word with
// the checksum of all their other bytes and of their place. It is set by one release store after the rest was written,
// and withdrawn by one before anything else is touched. So a reader finds a valid entry or none, and the result of a
// wild write fails the checksum.
//
// While no server runs, the seal of an entry may contain the sum of its slot's payload as well (arena/arena_sums.h).
// This entry is SUMMED: no reader takes it for sealed before its bytes were compared.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/sha256.h"
#include "base/shared_memory.h"

namespace kv {

// A sealed shard, as Python packs it. The ledger and the disk format have the same fields in layouts of their own, so
// that each can stay as it is when another changes.
struct LedgerRecord {
    int64_t arena_offset;
    Digest namespace_digest;
    Digest key;
    Digest parent;
    uint16_t group;
    uint16_t shard;
    uint32_t payload_bytes;
    uint32_t tenant;
    uint32_t slot_units;  // size of the slot in SLOT_ALIGN bytes
    uint64_t generation;
};
static_assert(sizeof(LedgerRecord) == 128, "no padding: records are packed");

// Copies the fields of a shard from one layout to another.
template <typename From, typename To>
void copy_shard(const From& from, To& to) {
    to.namespace_digest = from.namespace_digest;
    to.key = from.key;
    to.parent = from.parent;
    to.group = from.group;
    to.shard = from.shard;
    to.payload_bytes = from.payload_bytes;
    to.tenant = from.tenant;
    to.slot_units = from.slot_units;
    to.generation = from.generation;
}

class Ledger {
  public:
    static constexpr uint64_t NAMESPACES_MAX = 256;
    static constexpr uint64_t DOCUMENT_BYTES_MAX = 65536;

    static uint64_t file_bytes(uint64_t arena_bytes);

    // bad_argument when the file has another size or another header; nothing is changed then.
    Ledger(int fd, uint64_t arena_bytes);

    // Publishes records, all or (bad_argument) none: each place must be in range, free, and occur once.
    void seal(std::span<const LedgerRecord> records);
    // Withdraws entries; when it returns, no reader finds them. Free places are left alone.
    void clear(std::span<const int64_t> arena_offsets);
    // All valid entries, ascending by offset. Damaged ones, and SUMMED ones, are withdrawn and counted.
    std::vector<LedgerRecord> scan();
    uint64_t damaged() const { return damaged_; }

    void put_namespace(uint64_t index, std::span<const std::byte> document);
    void drop_namespace(uint64_t index);
    // Unmaps the file's pages from this process, so that pages written long ago do not count as its memory. The file
    // keeps its content; the next access to a page costs a minor fault.
    void forget_pages();
    std::vector<std::pair<uint64_t, std::string>> namespaces();

    enum class Seal : uint8_t { PLAIN = 0xa5, SUMMED = 0x5a };
    // Entries with that seal, ascending by offset. PLAIN: only valid ones. SUMMED: all, unchecked, since only the bytes
    // of a slot can tell whether its entry is right. Withdraws and counts nothing.
    std::vector<LedgerRecord> entries(Seal seal);
    // Turns PLAIN into SUMMED by one store: a writer that is killed leaves one or the other. Different threads may
    // change entries of different places.
    void put_sum(int64_t arena_offset, uint64_t sum);
    // Turns SUMMED into PLAIN. False when entry, place or sum have changed: then it stays as it is.
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
    // Calls visit(entry, record) for each entry that is not free.
    template <typename Visit>
    void visit_entries(Visit visit);
    void read_document(uint64_t index, std::vector<std::pair<uint64_t, std::string>>& documents);

    uint64_t arena_bytes_;
    Descriptor file_;
    Mapping mapping_;
    uint64_t damaged_ = 0;
};

}  // namespace kv
