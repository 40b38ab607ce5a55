// The digest of a payload, 61 bits: computed where its bytes are read out of an engine's memory, compared where they
// are written into one. docs/digest.md has the formula, the tables, the bound on what goes unnoticed, and test vectors.
//
// It is a sum over bytes that are each weighted by their place, so that any cut of a payload can be summed part by
// part, in any order, on any threads or devices (gpu/kernels/kernel_source.h), and added up. Against errors; an
// attacker computes it.
//
// Everything here is pure, for any thread, and for little-endian processors. Tables are made when they are first needed
// and stay: 24 KiB, and 8 bytes for each 4 KiB of the longest payload, 8 MiB at most. Lengths are in bytes.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/copies.h"
#include "base/sha256.h"

namespace kv {

constexpr uint64_t DIGEST_PRIME = (uint64_t{1} << 61) - 1;
constexpr uint64_t DIGEST_ROW_BYTES = 4096;  // that share an entry of the table A
constexpr uint64_t DIGEST_COLUMNS = DIGEST_ROW_BYTES / sizeof(uint32_t);
constexpr uint64_t NO_DIGEST = ~uint64_t{0};  // takes the place of a digest or a sum that nobody computed
constexpr uint64_t DIGEST_PAYLOAD_BYTES_MAX = uint64_t{1} << 32;

// The sum and the count of some of a payload's bytes. Sums of disjoint parts add up; the count shows that a part is
// missing even where its bytes are zero.
struct DigestSum {
    uint64_t sum = 0;  // in [0, DIGEST_PRIME)
    uint64_t bytes = 0;
};

DigestSum operator+(const DigestSum& one, const DigestSum& other);

enum class DigestPath {
    BEST,      // what the processor has
    AVX2,      // without AVX-512; for tests, as is the next one
    PORTABLE,  // for other processors
};

// The sum of a stretch whose first byte is byte `offset` of its payload; its address may be any. std::invalid_argument
// beyond DIGEST_PAYLOAD_BYTES_MAX.
DigestSum digest_sum(std::span<const std::byte> stretch, uint64_t offset, DigestPath path = DigestPath::BEST);

// Runs copies in order, and sums each into its place of `sums`: each byte is loaded once for both, and nothing is
// locked after prepare_digest(). Through::MEMORY: by non-temporal stores where the target allows; the caller fences.
void digest_copies(std::span<const Copy> copies, std::span<uint64_t> sums, Through through,
                   DigestPath path = DigestPath::BEST);

// The name under which a payload is stored. Under another name the same bytes have another digest.
struct ShardName {
    Digest namespace_digest;
    Digest key;
    uint16_t group;
    uint16_t shard;
};

// The digest, in [0, DIGEST_PRIME), from the sum of all bytes. nullopt: other than `payload_bytes` bytes were summed.
std::optional<uint64_t> payload_digest(const DigestSum& sum, const ShardName& name, uint64_t payload_bytes);
// From the sum of all bytes to the digest, and back. NO_DIGEST stays NO_DIGEST.
uint64_t digest_of(uint64_t sum, const ShardName& name, uint64_t payload_bytes);
uint64_t sum_of(uint64_t digest, const ShardName& name, uint64_t payload_bytes);
// Makes the tables for payloads of that length now. digest_sum() takes no lock for them afterwards.
void prepare_digest(uint64_t payload_bytes);

// ------------------------------------------------------------------ the tables, for kernels

// B: the lower limbs (30 bits) of all words of a row, then their upper limbs.
std::array<uint32_t, 2 * DIGEST_COLUMNS> digest_columns();
// A: the first `rows` entries. std::invalid_argument beyond those of the longest payload.
std::vector<uint64_t> digest_rows(uint64_t rows);

}  // namespace kv
