// Names of chunks. The formulas are in client/kvclient/keys.py; here are those whose cost grows with the prompt.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/sha256.h"

namespace kv {

// Packed 32-byte digests in prefix order.
using Keys = std::vector<std::byte>;

// The keys of all whole chunks: key[i] = H(key[i-1] || tokens of chunk i), where key[-1] is `before`.
Keys chain_keys(std::span<const uint32_t> tokens, size_t chunk_tokens, const Digest& before);

// H(head || hash) for each hash of an engine; without a head the hashes themselves.
Keys block_hash_keys(std::span<const std::byte> head, std::span<const Digest> hashes);

}  // namespace kv
