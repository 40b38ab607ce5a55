// The format of a device, byte by byte; docs/disk-format.md gives the reasons. Pure: nothing here does I/O.
//
// Two files, each with two copies of a superblock in front. One has the payloads, a row of extents for each segment.
// The other has a table for each segment: a label with the extent size that the segment serves, then the header of each
// extent. All numbers are little-endian, like every machine that this runs on.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "arena/ledger.h"
#include "base/shared_memory.h"

namespace kv::disk {

// The unit of payloads: O_DIRECT's alignment on every device that we know.
constexpr uint64_t BLOCK_BYTES = 4096;
static_assert(BLOCK_BYTES == SLOT_ALIGN, "payloads go straight between slots and extents");

constexpr uint32_t FORMAT = 3;
constexpr uint64_t SUPERBLOCKS = 2;
constexpr uint64_t SEGMENTS_OFFSET = SUPERBLOCKS * BLOCK_BYTES;  // in both files
constexpr uint64_t SEGMENT_BYTES_MAX = uint64_t{1} << 34;
constexpr uint64_t EXTENT_BYTES_MAX = uint64_t{1} << 30;  // one request copies it: the system's bound is 2 GiB
constexpr uint64_t FILE_BYTES_MAX = uint64_t{1} << 50;
constexpr uint32_t DEVICES_MAX = 64;

using StoreId = std::array<std::byte, 16>;
using Fingerprint = std::array<std::byte, 32>;

// A record as Python packs it: the ledger's record of a slot, and its place on disk.
struct DiskRecord {
    // arena_offset: -1 if there is none. slot_units: the extent's size. sum: nobody reads it, and recovery gives
    // NO_DIGEST
    LedgerRecord shard;
    int64_t extent;
    uint32_t device;
    uint32_t stored_s;

    uint64_t extent_bytes() const { return uint64_t{shard.slot_units} * BLOCK_BYTES; }
    // Bytes of the whole blocks that a payload takes in its extent and in its slot.
    uint64_t payload_block_bytes() const { return (shard.payload_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES; }
};
static_assert(sizeof(DiskRecord) == 152, "no padding: records are packed");

// One block, aligned for direct I/O.
struct alignas(BLOCK_BYTES) Block {
    std::byte bytes[BLOCK_BYTES];
};

// A label or a header in its table. It lies within one sector of 512 bytes, which devices write atomically.
struct Entry {
    std::byte bytes[256];
};
constexpr uint64_t ENTRY_BYTES = sizeof(Entry);

struct Place {
    uint64_t segment;
    uint64_t position;
    bool operator==(const Place&) const = default;
};

// Offsets in both files. Extents are named like slots: segment * segment_bytes + position * extent_bytes. The parts of
// a segment in both files have segment_bytes together.
struct Geometry {
    uint64_t segment_bytes;
    uint64_t segments;

    // Extents of 16 KiB need 1/64. The number of smaller extents is limited by the entries of the table.
    static constexpr uint64_t table_bytes(uint64_t segment_bytes) {
        const uint64_t bytes = segment_bytes / 64 / BLOCK_BYTES * BLOCK_BYTES;
        return bytes == 0 ? BLOCK_BYTES : bytes;
    }
    static uint64_t extents_per_segment(uint64_t segment_bytes, uint64_t extent_bytes) {
        const uint64_t table = table_bytes(segment_bytes);
        return std::min((segment_bytes - table) / extent_bytes, table / ENTRY_BYTES - 1);
    }
    uint64_t extents_per_segment(uint64_t extent_bytes) const {
        return extents_per_segment(segment_bytes, extent_bytes);
    }
    uint64_t row_bytes() const { return segment_bytes - table_bytes(segment_bytes); }
    uint64_t payload_file_bytes() const { return SEGMENTS_OFFSET + segments * row_bytes(); }
    uint64_t header_file_bytes() const { return SEGMENTS_OFFSET + segments * table_bytes(segment_bytes); }
    uint64_t file_bytes() const { return payload_file_bytes() + header_file_bytes(); }

    uint64_t label_offset(uint64_t segment) const { return SEGMENTS_OFFSET + segment * table_bytes(segment_bytes); }
    uint64_t header_offset(Place place) const {
        return label_offset(place.segment) + (1 + place.position) * ENTRY_BYTES;
    }
    uint64_t payload_offset(Place place, uint64_t extent_bytes) const {
        return SEGMENTS_OFFSET + place.segment * row_bytes() + place.position * extent_bytes;
    }
    int64_t extent(Place place, uint64_t extent_bytes) const {
        return static_cast<int64_t>(place.segment * segment_bytes + place.position * extent_bytes);
    }
    // bad_argument when no extent of that size has this name.
    Place place_of(int64_t extent, uint64_t extent_bytes) const;
};

struct Superblock {
    uint64_t segment_bytes;
    StoreId store;
    Fingerprint fingerprint;
};

// The extent size that a segment serves, and its epoch: a number drawn anew for each size. Records belong to one epoch.
struct SegmentLabel {
    uint64_t segment;
    uint64_t extent_bytes;
    uint64_t epoch;
};

// The content of a header: the record, and the digest of its payload.
struct Sealed {
    DiskRecord record;
    uint64_t digest;
};

enum class Found {
    EMPTY,    // it begins with zeros: never written, or withdrawn
    RECORD,   // of this store, this place and this epoch of the segment
    EARLIER,  // of an earlier epoch of the segment, or of an earlier use of the file, perhaps payload bytes
    DAMAGED,  // was ours; the checksum fails, or it names another place
};

enum class SuperblockFound {
    NONE,
    VALID,
    OLDER,  // whole, and of an earlier format
    NEWER,  // of a later format, which may have its seal elsewhere
    DAMAGED,
};

Block encode(const Superblock& superblock);
// Fills in the superblock if it is VALID or OLDER.
SuperblockFound decode(const Block& block, Superblock& superblock);
// The format version in a superblock of ours, which may be any.
uint32_t format_of(const Block& block);

Entry encode(const StoreId& store, const SegmentLabel& label);
Found decode(const Entry& entry, const StoreId& store, uint64_t segment, SegmentLabel& label);

Entry encode(const StoreId& store, uint64_t epoch, Place place, const Sealed& sealed);
// `label` is the segment's. The caller fills in the record's device and arena_offset.
Found decode(const Entry& entry, const StoreId& store, const SegmentLabel& label, Place place, Sealed& sealed);

// A hash of the fields that a caller must know to get a payload: namespace, key, group and shard.
uint64_t identity_of(const LedgerRecord& shard);

}  // namespace kv::disk
