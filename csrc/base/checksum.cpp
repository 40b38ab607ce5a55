#include "base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kv {

uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed) { return XXH64(bytes.data(), bytes.size(), seed); }

uint64_t xxh3(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace kv
