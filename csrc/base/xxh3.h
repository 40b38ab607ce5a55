// XXH3, 64 bits: against torn, misplaced and decayed bytes, not against an adversary. Some 20 GB/s a core.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

uint64_t xxh3(std::span<const std::byte> bytes);

}  // namespace kv
