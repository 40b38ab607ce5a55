// XXH64: a 64-bit checksum against torn, misplaced and decayed bytes. Not against an adversary.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed);

}  // namespace kv
