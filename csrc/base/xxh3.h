// XXH3, 64 bits: a checksum against torn, misplaced and decayed bytes, not against an adversary. About 20 GB/s per
// core.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

uint64_t xxh3(std::span<const std::byte> bytes);

}  // namespace kv
