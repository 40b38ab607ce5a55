#include "disk/format.h"

#include <cinttypes>
#include <cstring>

#include "base/check.h"
#include "base/checksum.h"

namespace kv::disk {
namespace {

constexpr uint64_t SUPERBLOCK_MAGIC = 0x314b534944564b00;  // "\0KVDISK1" as bytes
constexpr uint64_t SEGMENT_MAGIC = 0x314d474553564b00;     // "\0KVSEGM1"
constexpr uint64_t RECORD_MAGIC = 0x3144434552564b00;      // "\0KVRECD1"

struct SuperblockBytes {
    uint64_t magic;
    uint32_t format;
    uint32_t block_bytes;
    uint64_t segment_bytes;
    StoreId store;
    Fingerprint fingerprint;
    uint64_t seal;
};
static_assert(sizeof(SuperblockBytes) == 80);

struct SegmentBytes {
    uint64_t magic;
    StoreId store;
    uint64_t segment;
    uint64_t extent_bytes;
    uint64_t epoch;
    uint64_t seal;
};
static_assert(sizeof(SegmentBytes) == 56);

struct RecordBytes {
    uint64_t magic;
    StoreId store;
    uint64_t epoch;
    uint64_t segment;
    uint64_t position;
    Digest namespace_digest;
    Digest key;
    Digest parent;
    uint16_t group;
    uint16_t shard;
    uint32_t payload_bytes;
    uint32_t tenant;
    uint32_t slot_units;  // size of the extent
    uint64_t generation;
    uint64_t digest;  // of the payload
    uint32_t stored_s;
    uint32_t reserved;
    uint64_t seal;
};
static_assert(sizeof(RecordBytes) == 192, "no padding is hashed");
static_assert(sizeof(RecordBytes) <= ENTRY_BYTES && 512 % ENTRY_BYTES == 0, "one sector of 512 bytes holds it all");

// The seal is the last member: it covers everything before it.
template <typename Bytes>
uint64_t right_seal(const Bytes& content) {
    return xxh3({reinterpret_cast<const std::byte*>(&content), offsetof(Bytes, seal)});
}

template <typename Room, typename Bytes>
Room seal(Bytes& content) {
    content.seal = right_seal(content);
    Room room{};
    std::memcpy(room.bytes, &content, sizeof content);
    return room;
}

template <typename Bytes, typename Room>
Bytes contents(const Room& room) {
    Bytes content;
    std::memcpy(&content, room.bytes, sizeof content);
    return content;
}

}  // namespace

Place Geometry::place_of(int64_t extent, uint64_t extent_bytes) const {
    if (extent_bytes == 0) bad_argument(format("extent=%" PRId64 " of 0 bytes is no extent", extent));
    const auto name = static_cast<uint64_t>(extent);  // negative ones become too large
    const Place place{name / segment_bytes, name % segment_bytes / extent_bytes};
    const uint64_t count = extents_per_segment(extent_bytes);
    if (place.segment < segments && name % segment_bytes % extent_bytes == 0 && place.position < count) return place;
    bad_argument(format("extent=%" PRId64 " of %" PRIu64 " bytes must be one of %" PRIu64 " in each of %" PRIu64
                        " segments of %" PRIu64 " bytes",
                        extent, extent_bytes, count, segments, segment_bytes));
}

Block encode(const Superblock& superblock) {
    SuperblockBytes content{SUPERBLOCK_MAGIC,       FORMAT, BLOCK_BYTES, superblock.segment_bytes, superblock.store,
                            superblock.fingerprint, 0};
    return seal<Block>(content);
}

SuperblockFound decode(const Block& block, Superblock& superblock) {
    const auto content = contents<SuperblockBytes>(block);
    if (content.magic != SUPERBLOCK_MAGIC) return SuperblockFound::NONE;
    if (content.format > FORMAT) return SuperblockFound::NEWER;
    if (content.seal != right_seal(content) || content.block_bytes != BLOCK_BYTES) return SuperblockFound::DAMAGED;
    superblock = {content.segment_bytes, content.store, content.fingerprint};
    return content.format == FORMAT ? SuperblockFound::VALID : SuperblockFound::OLDER;
}

uint32_t format_of(const Block& block) { return contents<SuperblockBytes>(block).format; }

Entry encode(const StoreId& store, const SegmentLabel& label) {
    SegmentBytes content{SEGMENT_MAGIC, store, label.segment, label.extent_bytes, label.epoch, 0};
    return seal<Entry>(content);
}

Found decode(const Entry& entry, const StoreId& store, uint64_t segment, SegmentLabel& label) {
    const auto content = contents<SegmentBytes>(entry);
    if (content.magic != SEGMENT_MAGIC) return content.magic == 0 ? Found::EMPTY : Found::EARLIER;
    if (content.seal != right_seal(content)) return Found::DAMAGED;
    if (content.store != store) return Found::EARLIER;
    if (content.segment != segment || content.extent_bytes == 0 || content.extent_bytes % BLOCK_BYTES != 0) {
        return Found::DAMAGED;
    }
    label = {content.segment, content.extent_bytes, content.epoch};
    return Found::RECORD;
}

Entry encode(const StoreId& store, uint64_t epoch, Place place, const Sealed& sealed) {
    RecordBytes content{};
    content.magic = RECORD_MAGIC;
    content.store = store;
    content.epoch = epoch;
    content.segment = place.segment;
    content.position = place.position;
    copy_shard(sealed.record.shard, content);
    content.digest = sealed.digest;
    content.stored_s = sealed.record.stored_s;
    return seal<Entry>(content);
}

Found decode(const Entry& entry, const StoreId& store, const SegmentLabel& label, Place place, Sealed& sealed) {
    const auto content = contents<RecordBytes>(entry);
    if (content.magic != RECORD_MAGIC) return content.magic == 0 ? Found::EMPTY : Found::EARLIER;
    if (content.seal != right_seal(content)) return Found::DAMAGED;
    if (content.store != store) return Found::EARLIER;
    if (Place{content.segment, content.position} != place) return Found::DAMAGED;
    if (content.epoch != label.epoch) return Found::EARLIER;
    if (uint64_t{content.slot_units} * BLOCK_BYTES != label.extent_bytes ||
        content.payload_bytes > label.extent_bytes || content.generation == 0 || content.digest >= DIGEST_PRIME) {
        return Found::DAMAGED;
    }
    sealed = {};
    sealed.record.shard.arena_offset = -1;
    copy_shard(content, sealed.record.shard);
    sealed.record.shard.sum = NO_DIGEST;
    sealed.record.stored_s = content.stored_s;
    sealed.digest = content.digest;
    return Found::RECORD;
}

uint64_t identity_of(const LedgerRecord& shard) {
    const struct {
        Digest namespace_digest;
        Digest key;
        uint64_t group;
        uint64_t shard;
    } name{shard.namespace_digest, shard.key, shard.group, shard.shard};
    return xxh3({reinterpret_cast<const std::byte*>(&name), sizeof name});
}

}  // namespace kv::disk
