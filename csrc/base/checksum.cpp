#include "base/checksum.h"

#include <bit>
#include <cstring>

namespace kv {
namespace {

constexpr uint64_t P1 = 0x9e3779b185ebca87;
constexpr uint64_t P2 = 0xc2b2ae3d27d4eb4f;
constexpr uint64_t P3 = 0x165667b19e3779f9;
constexpr uint64_t P4 = 0x85ebca77c2b2ae63;
constexpr uint64_t P5 = 0x27d4eb2f165667c5;

// Removes the next little-endian number from the front and returns it.
template <typename T>
uint64_t take(std::span<const std::byte>& bytes) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof value);
    bytes = bytes.subspan(sizeof value);
    return value;
}

constexpr uint64_t round(uint64_t lane, uint64_t input) { return std::rotl(lane + input * P2, 31) * P1; }

}  // namespace

uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed) {
    const uint64_t total = bytes.size();
    uint64_t hash = seed + P5;
    if (bytes.size() >= 32) {
        uint64_t lanes[4] = {seed + P1 + P2, seed + P2, seed, seed - P1};
        while (bytes.size() >= 32) {
            for (uint64_t& lane : lanes) lane = round(lane, take<uint64_t>(bytes));
        }
        hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
        for (const uint64_t lane : lanes) hash = (hash ^ round(0, lane)) * P1 + P4;
    }
    hash += total;
    while (bytes.size() >= 8) hash = std::rotl(hash ^ round(0, take<uint64_t>(bytes)), 27) * P1 + P4;
    if (bytes.size() >= 4) hash = std::rotl(hash ^ take<uint32_t>(bytes) * P1, 23) * P2 + P3;
    while (!bytes.empty()) hash = std::rotl(hash ^ take<uint8_t>(bytes) * P5, 11) * P1;
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
}

}  // namespace kv
