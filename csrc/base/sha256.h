// SHA-256 (FIPS 180-4) for the names of chunks, with the processor's instructions if it has them.
//
// The input of a chunk is short, about a kilobyte: a library's set-up and tear-down would cost as much again.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

using Digest = std::array<std::byte, 32>;

enum class Sha256Path {
    BEST,      // the processor's instructions, if it has some
    PORTABLE,  // for tests, and for other processors
};

// The digest of the concatenated parts. Pure; any thread.
Digest sha256(std::span<const std::span<const std::byte>> parts, Sha256Path path = Sha256Path::BEST);

}  // namespace kv
