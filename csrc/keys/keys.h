// Names of chunks. The formulas are in client/kvclient/keys.py; this is what of them depends on a prompt's length.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/sha256.h"

namespace kv {

// Packed: one 32-byte digest behind the other, in prefix order.
using Keys = std::vector<std::byte>;

// Of all whole chunks: key[i] = H(key[i-1] || tokens of chunk i), with `before` in front of the first.
Keys chain_keys(std::span<const uint32_t> tokens, size_t chunk_tokens, const Digest& before);

// H(head || hash) of each hash of an engine; without a head the hashes themselves.
Keys block_hash_keys(std::span<const std::byte> head, std::span<const Digest> hashes);

}  // namespace kv
