// What lies on a device, byte by byte; docs/disk-format.md tells why. Pure: nothing here does I/O.
//
// The file: two copies of a superblock, then segments of equal size. A segment: one block that says which extent size
// it serves, one header block for each position, then the payloads. All numbers are little-endian, like every machine
// that this runs on.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ledger.h"
#include "shared_memory.h"

namespace kv::disk {

// The unit of all I/O: O_DIRECT's alignment on every device that we know.
constexpr uint64_t BLOCK_BYTES = 4096;
static_assert(BLOCK_BYTES == SLOT_ALIGN, "payloads go straight between slots and extents");

constexpr uint32_t FORMAT = 1;
constexpr uint64_t SUPERBLOCKS = 2;
constexpr uint64_t SEGMENTS_OFFSET = SUPERBLOCKS * BLOCK_BYTES;
constexpr uint64_t SEGMENT_BYTES_MAX = uint64_t{1} << 34;
constexpr uint64_t EXTENT_BYTES_MAX = uint64_t{1} << 30;  // one request moves it: the system's bound is 2 GiB
constexpr uint64_t FILE_BYTES_MAX = uint64_t{1} << 50;
constexpr uint32_t DEVICES_MAX = 64;

using StoreId = std::array<std::byte, 16>;
using Fingerprint = std::array<std::byte, 32>;

// A record as Python packs it: what the ledger says of a slot, and where it is on disk.
struct DiskRecord {
    LedgerRecord shard;  // arena_offset: -1 where there is none. slot_units: the extent's size
    int64_t extent;
    uint32_t device;
    uint32_t stored_s;

    uint64_t extent_bytes() const { return uint64_t{shard.slot_units} * BLOCK_BYTES; }
    // What a payload takes in its extent and in its slot.
    uint64_t payload_block_bytes() const { return (shard.payload_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES; }
};
static_assert(sizeof(DiskRecord) == 144, "no padding: records are packed");

// A block as it is read and written.
struct alignas(BLOCK_BYTES) Block {
    std::byte bytes[BLOCK_BYTES];
};

struct Place {
    uint64_t segment;
    uint64_t position;
    bool operator==(const Place&) const = default;
};

// Where things are. Extents are named as slots are: segment * segment_bytes + position * extent_bytes.
struct Geometry {
    uint64_t segment_bytes;
    uint64_t segments;

    static uint64_t extents_per_segment(uint64_t segment_bytes, uint64_t extent_bytes) {
        return (segment_bytes - BLOCK_BYTES) / (BLOCK_BYTES + extent_bytes);
    }
    uint64_t extents_per_segment(uint64_t extent_bytes) const {
        return extents_per_segment(segment_bytes, extent_bytes);
    }
    uint64_t file_bytes() const { return SEGMENTS_OFFSET + segments * segment_bytes; }
    uint64_t segment_offset(uint64_t segment) const { return SEGMENTS_OFFSET + segment * segment_bytes; }
    uint64_t header_offset(Place place) const {
        return segment_offset(place.segment) + (1 + place.position) * BLOCK_BYTES;
    }
    uint64_t payload_offset(Place place, uint64_t extent_bytes) const {
        const uint64_t table_bytes = (1 + extents_per_segment(extent_bytes)) * BLOCK_BYTES;
        return segment_offset(place.segment) + table_bytes + place.position * extent_bytes;
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

// Which size a segment serves, and since when: the epoch is drawn anew each time, and names the records of this life.
struct SegmentLabel {
    uint64_t segment;
    uint64_t extent_bytes;
    uint64_t epoch;
};

// What a header block says beside the record.
struct Sealed {
    DiskRecord record;
    uint64_t payload_hash;
};

enum class Found {
    EMPTY,    // it begins with zeros: never written, or withdrawn
    RECORD,   // of this store, this place and this life of the segment
    EARLIER,  // of an earlier life of the segment or of the file, a payload perhaps
    DAMAGED,  // ours once; the checksum fails, or it names another place
};

enum class SuperblockFound { NONE, VALID, OTHER_FORMAT, DAMAGED };

Block encode(const Superblock& superblock);
SuperblockFound decode(const Block& block, Superblock& superblock);

Block encode(const StoreId& store, const SegmentLabel& label);
Found decode(const Block& block, const StoreId& store, uint64_t segment, SegmentLabel& label);

Block encode(const StoreId& store, uint64_t epoch, Place place, const Sealed& sealed);
// `label` is the segment's. device and arena_offset of the record are the caller's to fill in.
Found decode(const Block& block, const StoreId& store, const SegmentLabel& label, Place place, Sealed& sealed);

// One number for what a caller must know to get a payload: namespace, key, group and shard.
uint64_t identity_of(const LedgerRecord& shard);

}  // namespace kv::disk
