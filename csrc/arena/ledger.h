// The ledger: the arena's content, described in a memfd beside it. The index can be rebuilt from it after a brain died.
//
// The file: a header page; NAMESPACES_MAX namespace documents; one 136-byte entry for each place where a slot can start
// (arena offset / SLOT_ALIGN), 30 in a page. It is sparse: only pages with entries take memory, at most 1/30 of the
// arena.
//
// One writer, which may be killed at any instruction. Entry, document and header each have a *seal*, a 64-bit word with
// the checksum of all their other bytes and of their place. It is set by one release store after the rest was written,
// and withdrawn by one before anything else is touched. So a reader finds a valid entry or none, and the result of a
// wild write fails the checksum.
//
// An entry holds the digest of its slot's payload (base/digest.h). Callers give and get the sum: the digest without the
// name's part, which is what a copy of the bytes can compute.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
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
    uint64_t sum;  // of the payload; NO_DIGEST: it was not summed
};
static_assert(sizeof(LedgerRecord) == 136, "no padding: records are packed");

inline ShardName name_of(const LedgerRecord& record) {
    return {record.namespace_digest, record.key, record.group, record.shard};
}

// Copies the fields of a shard from one layout to another, but for the digest.
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
    // All valid entries, ascending by offset. Damaged ones are withdrawn and counted.
    std::vector<LedgerRecord> scan();
    uint64_t damaged() const { return damaged_; }

    void put_namespace(uint64_t index, std::span<const std::byte> document);
    void drop_namespace(uint64_t index);
    // Unmaps the file's pages from this process, so that pages written long ago do not count as its memory. The file
    // keeps its content; the next access to a page costs a minor fault.
    void forget_pages();
    std::vector<std::pair<uint64_t, std::string>> namespaces();

    // Readers beside the writer, who asked for the bytes of these slots after their entries were published, and keeps
    // the slots meanwhile. Entries that were withdrawn since still have their content.
    //
    // The sum of each slot. nullopt: the slots hold other payloads than `names` says (names_hash()).
    std::optional<std::vector<uint64_t>> sums(std::span<const int64_t> arena_offsets, uint64_t names) const;
    // The sum of a slot that should hold the record's payload. Another name gives another sum, as good as any wrong
    // one.
    uint64_t sum_of(const LedgerRecord& record) const;

  private:
    struct Header;
    struct Entry;
    struct Document;

    Entry& entry_of(int64_t arena_offset) const;
    Document& document_at(uint64_t index) const;
    bool is_valid(const LedgerRecord& record) const;
    template <typename Visit>
    void visit_extents(uint64_t from, uint64_t to, Visit visit);
    void read_entry(uint64_t place, std::vector<LedgerRecord>& records);
    void read_document(uint64_t index, std::vector<std::pair<uint64_t, std::string>>& documents);

    uint64_t arena_bytes_;
    Descriptor file_;
    Mapping mapping_;
    uint64_t damaged_ = 0;
};

// A hash of the names of payloads of one shard of one group, in this order: the first 8 bytes of
// SHA-256(namespace ‖ group ‖ shard ‖ keys).
uint64_t names_hash(const Digest& namespace_digest, uint16_t group, uint16_t shard, std::span<const std::byte> keys);

}  // namespace kv
