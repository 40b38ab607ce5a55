#include "keys/marks.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace kv {
namespace {

constexpr uint64_t KIND_BITS = 3;
constexpr uint64_t GONE = 3;

}  // namespace

Marker::Marker(std::span<const std::byte> name_space, uint64_t epoch) : bytes_(name_space.size() + sizeof epoch) {
    if (bytes_ > block_.size()) bad_argument(format("namespace: %zu bytes; expected at most 120", name_space.size()));
    std::memcpy(block_.data(), name_space.data(), name_space.size());
    for (size_t i = 0; i < sizeof epoch; ++i) block_[name_space.size() + i] = static_cast<std::byte>(epoch >> (8 * i));
}

uint64_t Marker::of(std::span<const std::byte> key) const {
    Blake2bBlock block = block_;
    const size_t room = block.size() - bytes_;
    if (key.size() > room) bad_argument(format("key: %zu bytes; expected at most %zu", key.size(), room));
    std::memcpy(block.data() + bytes_, key.data(), key.size());
    return blake2b_64(block, bytes_ + key.size()) & ~KIND_BITS;
}

MarkTable::MarkTable(size_t most) : marks_(most), last_bucket_(most / WAYS - 1) {
    if (most < WAYS || !std::has_single_bit(most)) {
        bad_argument(format("most=%zu must be a power of two and at least %zu", most, WAYS));
    }
}

uint64_t MarkTable::put(uint64_t mark) {
    const auto first = marks_.begin() + bucket(mark), end = first + WAYS;
    auto place = std::find_if(first, end, [&](uint64_t there) { return (there | KIND_BITS) == (mark | KIND_BITS); });
    if (place != end) {
        *place = mark;
        return 0;
    }
    // A free place is 0; what is gone is needed less than what is there.
    place = std::find(first, end, uint64_t{0});
    if (place == end) place = std::find_if(first, end, [](uint64_t there) { return (there & KIND_BITS) == GONE; });
    if (place == end) place = first + (mark >> 60) % WAYS;
    return std::exchange(*place, mark);
}

uint64_t MarkTable::kind(uint64_t mark) const {
    const auto first = marks_.begin() + bucket(mark), end = first + WAYS;
    const auto place = std::find_if(first, end, [&](uint64_t there) { return (there & ~KIND_BITS) == mark; });
    return place == end ? 0 : *place & KIND_BITS;
}

}  // namespace kv
