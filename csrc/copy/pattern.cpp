#include "copy/pattern.h"

#include <bit>
#include <cinttypes>
#include <cstring>

#include "base/check.h"

namespace kv {
namespace {

static_assert(std::endian::native == std::endian::little, "slots and ledgers are little-endian");

// A 64-bit finalizer (Stafford's variant 13) over a counter: neighbouring words and seeds share no bits.
constexpr uint64_t word_at(uint64_t seed, uint64_t index) {
    uint64_t x = seed + (index + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

uint64_t bytes_that_differ(uint64_t found, uint64_t expected, uint64_t bytes) {
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < bytes; ++i) {
        if ((found >> 8 * i & 0xff) != (expected >> 8 * i & 0xff)) ++wrong;
    }
    return wrong;
}

}  // namespace

void write_pattern(std::byte* target, uint64_t bytes, uint64_t seed) {
    const uint64_t words = bytes / 8;
    for (uint64_t i = 0; i < words; ++i) {
        const uint64_t word = word_at(seed, i);
        std::memcpy(target + 8 * i, &word, 8);
    }
    const uint64_t last = word_at(seed, words);
    std::memcpy(target + 8 * words, &last, bytes % 8);
}

uint64_t count_wrong(const std::byte* source, uint64_t bytes, uint64_t seed) {
    const uint64_t words = bytes / 8;
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < words; ++i) {
        uint64_t found;
        std::memcpy(&found, source + 8 * i, 8);
        const uint64_t expected = word_at(seed, i);
        if (found != expected) [[unlikely]]
            wrong += bytes_that_differ(found, expected, 8);
    }
    uint64_t found = 0;
    std::memcpy(&found, source + 8 * words, bytes % 8);
    return wrong + bytes_that_differ(found, word_at(seed, words), bytes % 8);
}

Pattern::Pattern(int fd, uint64_t bytes) {
    const uint64_t present = file_bytes(fd);
    if (present < bytes) bad_argument(format("bytes=%" PRIu64 " must be in (0, file=%" PRIu64 "]", bytes, present));
    mapping_ = Mapping(fd, bytes, "a pattern");
}

void Pattern::check(std::span<const PatternRange> ranges) const {
    for (const PatternRange& range : ranges) {
        if (range.offset > mapping_.bytes() || range.bytes > mapping_.bytes() - range.offset) {
            bad_argument(format("range of %" PRIu64 " bytes at %" PRIu64 " leaves the mapping of %" PRIu64 " bytes",
                                range.bytes, range.offset, mapping_.bytes()));
        }
    }
}

void Pattern::fill(std::span<const PatternRange> ranges) {
    check(ranges);
    for (const PatternRange& range : ranges) write_pattern(mapping_.data() + range.offset, range.bytes, range.seed);
}

uint64_t Pattern::wrong(std::span<const PatternRange> ranges) const {
    check(ranges);
    uint64_t wrong = 0;
    for (const PatternRange& range : ranges) {
        wrong += count_wrong(mapping_.data() + range.offset, range.bytes, range.seed);
    }
    return wrong;
}

}  // namespace kv
