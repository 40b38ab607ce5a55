// SHA-256 (FIPS 180-4) for the names of chunks, by the processor's own instructions where it has them.
//
// A hash per chunk is short, a kilobyte or so: through a library's objects it costs as much again to begin and end it.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

using Digest = std::array<std::byte, 32>;

enum class Sha256Path {
    BEST,      // what the processor offers
    PORTABLE,  // for tests, and where it offers nothing
};

// Of the parts one behind the other. Pure; any thread.
Digest sha256(std::span<const std::span<const std::byte>> parts, Sha256Path path = Sha256Path::BEST);

}  // namespace kv
