#include "keys/keys.h"

#include <bit>
#include <cstring>

namespace kv {

// Other processors would have to swap the tokens first.
static_assert(std::endian::native == std::endian::little);

Keys chain_keys(std::span<const uint32_t> tokens, size_t chunk_tokens, const Digest& before) {
    const size_t chunks = tokens.size() / chunk_tokens;
    Keys keys(chunks * sizeof(Digest));
    Digest key = before;
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
        const auto part = std::as_bytes(tokens.subspan(chunk * chunk_tokens, chunk_tokens));
        key = sha256(std::array{std::span<const std::byte>(key), part});
        std::memcpy(keys.data() + chunk * sizeof key, key.data(), sizeof key);
    }
    return keys;
}

Keys block_hash_keys(std::span<const std::byte> head, std::span<const Digest> hashes) {
    Keys keys;
    keys.reserve(hashes.size() * sizeof(Digest));
    for (const Digest& hash : hashes) {
        const Digest key = head.empty() ? hash : sha256(std::array{head, std::span<const std::byte>(hash)});
        keys.insert(keys.end(), key.begin(), key.end());
    }
    return keys;
}

}  // namespace kv
