// Checksums against torn, misplaced and decayed bytes, not against an adversary.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

// XXH64, for the ledger and the code cache.
uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed);

// XXH3, 64 bits, for the structures on disk and for names.
uint64_t xxh3(std::span<const std::byte> bytes);

}  // namespace kv
