// BLAKE2b (RFC 7693) of one short message, for the marks of chunks.
//
// A lookup that misses waits for one such digest. With hashlib, mark and look take nearly twice as long when the code
// has left the caches.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kv {

// The longest message; shorter ones are followed by zeros.
using Blake2bBlock = std::array<std::byte, 128>;

// The digest of 8 bytes, without a key, of the first `bytes` bytes of the block, as a little-endian number. Pure.
uint64_t blake2b_64(const Blake2bBlock& block, size_t bytes);

}  // namespace kv
