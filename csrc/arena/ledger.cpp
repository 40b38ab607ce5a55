#include "arena/ledger.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <unordered_set>

#include "base/check.h"
#include "base/checksum.h"

namespace kv {
namespace {

constexpr uint64_t MAGIC = 0x325247444c564b00;  // "\0KVLDGR2"
constexpr uint64_t PAGE_BYTES = 4096;

// The low byte of a seal distinguishes a checksum that happens to be 0 from a free place.
constexpr uint64_t KIND = 0xff;
constexpr uint64_t SEALED = 0xa5;
constexpr uint64_t FREE = 0;

std::atomic_ref<uint64_t> atomic(uint64_t& seal) { return std::atomic_ref<uint64_t>(seal); }

uint64_t seal_of(const void* content, size_t bytes, uint64_t place) {
    return (checksum({static_cast<const std::byte*>(content), bytes}, place) & ~KIND) | SEALED;
}

void withdraw(uint64_t& seal) {
    atomic(seal).store(FREE, std::memory_order_release);
    // All later writes of this thread, here or into the slot, come after it.
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool is_sum(uint64_t sum) { return sum < DIGEST_PRIME || sum == NO_DIGEST; }

void publish(uint64_t& seal, uint64_t value) { atomic(seal).store(value, std::memory_order_release); }

}  // namespace

struct Ledger::Header {
    uint64_t magic;  // written last; 0 = a new ledger, or one whose writer died before this
    uint64_t arena_bytes;
    uint32_t entry_bytes;
    uint32_t slot_align;
    uint64_t seal;

    uint64_t right_seal() const { return seal_of(this, offsetof(Header, seal), MAGIC); }
};

struct Ledger::Entry {
    Digest namespace_digest;
    Digest key;
    Digest parent;
    uint64_t generation;
    uint64_t digest;
    uint32_t payload_bytes;
    uint32_t tenant;
    uint32_t slot_units;
    uint16_t group;
    uint16_t shard;
    uint64_t seal;

    uint64_t right_seal(uint64_t arena_offset) const { return seal_of(this, offsetof(Entry, seal), arena_offset); }
    ShardName name() const { return {namespace_digest, key, group, shard}; }
};

struct Ledger::Document {
    uint64_t seal;
    uint64_t bytes;
    std::byte reserved[PAGE_BYTES - 16];
    std::byte content[DOCUMENT_BYTES_MAX];

    // `length` is a parameter because a reader must have checked it before.
    uint64_t right_seal(uint64_t index, uint64_t length) const {
        return seal_of(content, length, index << 32 | length);
    }
};

namespace {

constexpr uint64_t DOCUMENTS_OFFSET = PAGE_BYTES;
constexpr uint64_t ENTRY_BYTES = 136;
constexpr uint64_t ENTRIES_A_PAGE = PAGE_BYTES / ENTRY_BYTES;  // so no entry crosses a page
constexpr uint64_t ENTRIES_OFFSET =
    DOCUMENTS_OFFSET + Ledger::NAMESPACES_MAX * (PAGE_BYTES + Ledger::DOCUMENT_BYTES_MAX);
static_assert(ENTRIES_OFFSET % PAGE_BYTES == 0);

}  // namespace

uint64_t Ledger::file_bytes(uint64_t arena_bytes) {
    if (arena_bytes == 0 || arena_bytes % SLOT_ALIGN != 0 || arena_bytes > uint64_t{1} << 50) {
        bad_argument(
            format("arena_bytes=%" PRIu64 " must be a multiple of %" PRIu64 " in (0, 2^50]", arena_bytes, SLOT_ALIGN));
    }
    const uint64_t pages = (arena_bytes / SLOT_ALIGN + ENTRIES_A_PAGE - 1) / ENTRIES_A_PAGE;
    return ENTRIES_OFFSET + pages * PAGE_BYTES;
}

Ledger::Ledger(int fd, uint64_t arena_bytes) : arena_bytes_(arena_bytes), file_(duplicate(fd, "the ledger")) {
    static_assert(sizeof(Entry) == ENTRY_BYTES && offsetof(Entry, seal) == ENTRY_BYTES - 8, "no padding is hashed");
    static_assert(sizeof(Document) == PAGE_BYTES + DOCUMENT_BYTES_MAX);
    static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);
    const uint64_t needed = file_bytes(arena_bytes);
    const uint64_t present = kv::file_bytes(fd);
    if (present != needed) {
        bad_argument(format("the ledger of an arena of %" PRIu64 " bytes has %" PRIu64 " bytes, this file %" PRIu64,
                            arena_bytes, needed, present));
    }
    mapping_ = Mapping(fd, needed, "the ledger");
    Header& found = *reinterpret_cast<Header*>(mapping_.data());
    Header right{MAGIC, arena_bytes, ENTRY_BYTES, SLOT_ALIGN, 0};
    right.seal = right.right_seal();
    if (atomic(found.magic).load(std::memory_order_acquire) == 0) {
        std::memcpy(mapping_.data() + sizeof found.magic, &right.arena_bytes, sizeof right - sizeof right.magic);
        publish(found.magic, right.magic);
    }
    if (std::memcmp(&found, &right, sizeof right) == 0) return;
    if (found.magic == MAGIC && found.seal == found.right_seal()) {
        bad_argument(format("the ledger is for an arena of %" PRIu64 " bytes, the arena has %" PRIu64,
                            found.arena_bytes, arena_bytes));
    }
    bad_argument("the ledger's header is damaged, or of another release");
}

Ledger::Entry& Ledger::entry_of(int64_t arena_offset) const {
    if (arena_offset < 0 || static_cast<uint64_t>(arena_offset) >= arena_bytes_ ||
        arena_offset % static_cast<int64_t>(SLOT_ALIGN) != 0) {
        bad_argument(format("arena_offset=%" PRId64 " must be a multiple of %" PRIu64 " in [0, %" PRIu64 ")",
                            arena_offset, SLOT_ALIGN, arena_bytes_));
    }
    const uint64_t place = static_cast<uint64_t>(arena_offset) / SLOT_ALIGN;
    std::byte* const page = mapping_.data() + ENTRIES_OFFSET + place / ENTRIES_A_PAGE * PAGE_BYTES;
    return reinterpret_cast<Entry*>(page)[place % ENTRIES_A_PAGE];
}

bool Ledger::is_valid(const LedgerRecord& record) const {
    const uint64_t slot_bytes = uint64_t{record.slot_units} * SLOT_ALIGN;
    return slot_bytes > 0 && record.payload_bytes <= slot_bytes && is_sum(record.sum) &&
           static_cast<uint64_t>(record.arena_offset) + slot_bytes <= arena_bytes_;
}

void Ledger::seal(std::span<const LedgerRecord> records) {
    std::unordered_set<int64_t> places;
    for (const LedgerRecord& record : records) {
        if (atomic(entry_of(record.arena_offset).seal).load() != FREE || !places.insert(record.arena_offset).second) {
            bad_argument(format("the place at arena_offset=%" PRId64 " is sealed already", record.arena_offset));
        }
        if (!is_valid(record)) {
            bad_argument(format("a payload of %u bytes in %u units of %" PRIu64 " bytes at %" PRId64
                                " does not fit its slot or the arena of %" PRIu64 " bytes, or has no sum in %" PRIx64,
                                record.payload_bytes, record.slot_units, SLOT_ALIGN, record.arena_offset, arena_bytes_,
                                record.sum));
        }
    }
    for (const LedgerRecord& record : records) {
        Entry& entry = entry_of(record.arena_offset);
        copy_shard(record, entry);
        entry.digest = digest_of(record.sum, entry.name(), record.payload_bytes);
        publish(entry.seal, entry.right_seal(static_cast<uint64_t>(record.arena_offset)));
    }
}

void Ledger::clear(std::span<const int64_t> arena_offsets) {
    for (const int64_t offset : arena_offsets) entry_of(offset);  // throws before any change unless all are in range
    for (const int64_t offset : arena_offsets) withdraw(entry_of(offset).seal);
}

// Calls visit(begin, end) for the allocated stretches of [from, to): reading a hole would allocate it.
template <typename Visit>
void Ledger::visit_extents(uint64_t from, uint64_t to, Visit visit) {
    for (uint64_t at = from; at < to;) {
        const off_t data = ::lseek(file_.get(), static_cast<off_t>(at), SEEK_DATA);
        if (data < 0 || static_cast<uint64_t>(data) >= to) return;
        const off_t hole = ::lseek(file_.get(), data, SEEK_HOLE);
        KV_ASSERT(hole > data);
        at = std::min(static_cast<uint64_t>(hole), to);
        visit(static_cast<uint64_t>(data), at);
    }
}

std::vector<LedgerRecord> Ledger::scan() {
    std::vector<LedgerRecord> records;
    const uint64_t places = arena_bytes_ / SLOT_ALIGN;
    visit_extents(ENTRIES_OFFSET, mapping_.bytes(), [&](uint64_t from, uint64_t to) {
        const uint64_t first = (from - ENTRIES_OFFSET) / PAGE_BYTES * ENTRIES_A_PAGE;
        const uint64_t end = std::min((to - ENTRIES_OFFSET) / PAGE_BYTES * ENTRIES_A_PAGE, places);
        for (uint64_t place = first; place < end; ++place) read_entry(place, records);
    });
    return records;
}

void Ledger::read_entry(uint64_t place, std::vector<LedgerRecord>& records) {
    LedgerRecord record{};
    record.arena_offset = static_cast<int64_t>(place * SLOT_ALIGN);
    Entry& entry = entry_of(record.arena_offset);
    const uint64_t seal = atomic(entry.seal).load(std::memory_order_acquire);
    if (seal == FREE) return;
    copy_shard(entry, record);
    record.sum = kv::sum_of(entry.digest, entry.name(), entry.payload_bytes);
    if (seal == entry.right_seal(static_cast<uint64_t>(record.arena_offset)) && is_valid(record)) {
        records.push_back(record);
    } else {
        withdraw(entry.seal);
        ++damaged_;
    }
}

std::optional<std::vector<uint64_t>> Ledger::sums(std::span<const int64_t> arena_offsets, uint64_t names) const {
    std::vector<uint64_t> sums;
    std::vector<std::byte> keys;
    const Entry* first = nullptr;
    for (const int64_t offset : arena_offsets) {
        const Entry& entry = entry_of(offset);
        if (first == nullptr) first = &entry;
        const bool alike = entry.namespace_digest == first->namespace_digest && entry.group == first->group &&
                           entry.shard == first->shard;
        if (!alike) return std::nullopt;
        keys.insert(keys.end(), entry.key.begin(), entry.key.end());
        sums.push_back(kv::sum_of(entry.digest, entry.name(), entry.payload_bytes));
    }
    if (first == nullptr || names_hash(first->namespace_digest, first->group, first->shard, keys) == names) return sums;
    return std::nullopt;
}

uint64_t Ledger::sum_of(const LedgerRecord& record) const {
    return kv::sum_of(entry_of(record.arena_offset).digest, name_of(record), record.payload_bytes);
}

uint64_t names_hash(const Digest& namespace_digest, uint16_t group, uint16_t shard, std::span<const std::byte> keys) {
    const uint16_t numbers[] = {group, shard};
    const Digest hash = sha256(std::array{std::span<const std::byte>(namespace_digest),
                                          std::as_bytes(std::span<const uint16_t>(numbers)), keys});
    uint64_t head;
    std::memcpy(&head, hash.data(), sizeof head);
    return head;
}

Ledger::Document& Ledger::document_at(uint64_t index) const {
    if (index >= NAMESPACES_MAX)
        bad_argument(format("index=%" PRIu64 " must be in [0, %" PRIu64 ")", index, NAMESPACES_MAX));
    return reinterpret_cast<Document*>(mapping_.data() + DOCUMENTS_OFFSET)[index];
}

void Ledger::put_namespace(uint64_t index, std::span<const std::byte> document) {
    Document& place = document_at(index);
    if (document.empty() || document.size() > DOCUMENT_BYTES_MAX) {
        bad_argument(format("a document of %zu bytes must have 1 to %" PRIu64, document.size(), DOCUMENT_BYTES_MAX));
    }
    withdraw(place.seal);
    place.bytes = document.size();
    std::memcpy(place.content, document.data(), document.size());
    publish(place.seal, place.right_seal(index, document.size()));
}

void Ledger::drop_namespace(uint64_t index) { withdraw(document_at(index).seal); }

void Ledger::forget_pages() {
    if (::madvise(mapping_.data(), mapping_.bytes(), MADV_DONTNEED) != 0) throw_errno("madvise(MADV_DONTNEED)");
}

std::vector<std::pair<uint64_t, std::string>> Ledger::namespaces() {
    std::vector<std::pair<uint64_t, std::string>> documents;
    for (uint64_t index = 0; index < NAMESPACES_MAX; ++index) {
        const uint64_t seal_offset = DOCUMENTS_OFFSET + index * sizeof(Document);
        visit_extents(seal_offset, seal_offset + sizeof(uint64_t),
                      [&](uint64_t, uint64_t) { read_document(index, documents); });
    }
    return documents;
}

void Ledger::read_document(uint64_t index, std::vector<std::pair<uint64_t, std::string>>& documents) {
    Document& place = document_at(index);
    const uint64_t seal = atomic(place.seal).load(std::memory_order_acquire);
    if (seal == FREE) return;
    const uint64_t bytes = place.bytes;
    if (bytes >= 1 && bytes <= DOCUMENT_BYTES_MAX && seal == place.right_seal(index, bytes)) {
        documents.emplace_back(index, std::string(reinterpret_cast<const char*>(place.content), bytes));
    } else {
        withdraw(place.seal);
        ++damaged_;
    }
}

}  // namespace kv
