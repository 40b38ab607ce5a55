#include "gpu/staging/digest_passes.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"

namespace kv::gpu {
namespace {

DeviceMemory take_shares(const Driver& driver, uint64_t bytes) {
    std::optional<DeviceMemory> memory = DeviceMemory::take(driver, bytes);
    if (!memory) {
        throw Refusal("device-memory", format("no %" PRIu64 " bytes of device memory are left for digests", bytes));
    }
    return std::move(*memory);
}

// Writes a list, piece after piece.
struct Lister {
    DigestPiece* next;
    DigestPiece* const end;
    const unsigned short sum;

    bool add(Address from, uint64_t offset, uint64_t bytes) {
        if (next == end) return false;
        *next++ = {from, static_cast<unsigned>(offset), static_cast<unsigned short>(bytes), sum};
        return true;
    }
};

// Lists bytes [begin, end) of the shard where they lie in staging.
bool list_staged(Lister& lister, const StagedStretch& stretch, uint64_t begin, uint64_t end, Address staged) {
    while (begin < end) {
        const uint64_t bytes = std::min<uint64_t>(end - begin, PIECE_BYTES_MAX);
        if (!lister.add(staged + stretch.staging + (begin - stretch.begin), begin, bytes)) return false;
        begin += bytes;
    }
    return true;
}

// The pieces of a stretch come in the order of its bytes.
bool list_stretch(Lister& lister, const StagedStretch& stretch, std::span<const Piece> pieces, Address staged) {
    uint64_t at = stretch.begin;
    for (const Piece& piece : pieces) {
        const uint64_t offset = stretch.begin + (piece.staging - stretch.staging);
        if (staged != 0 && at < offset && !list_staged(lister, stretch, at, offset, staged)) return false;
        if (!lister.add(piece.pool, offset, piece.bytes)) return false;
        at = offset + piece.bytes;
    }
    return staged == 0 || list_staged(lister, stretch, at, stretch.end, staged);
}

}  // namespace

DigestPasses::DigestPasses(const Driver& driver, uint32_t segments, uint32_t pieces_max, uint32_t sums_max)
    : pieces_max_(pieces_max),
      sums_max_(sums_max),
      shares_(take_shares(driver, uint64_t{segments} * sums_max * sizeof(DigestShares))),
      seen_(driver, shares_.bytes()),
      lists_(driver, uint64_t{segments} * pieces_max * sizeof(DigestPiece)),
      passes_(segments) {
    KV_ASSERT(sums_max <= 1 + std::numeric_limits<decltype(DigestPiece::sum)>::max());
    std::memset(seen_.data(), 0, seen_.bytes());
    for (Pass& pass : passes_) pass.before.resize(sums_max);
}

void DigestPasses::begin(uint32_t segment) {
    Pass& pass = passes_[segment];
    std::ranges::copy(shares_of(segment), pass.before.begin());
    pass.pieces = pass.sums = 0;
}

void DigestPasses::begin_sum(uint32_t segment) {
    KV_ASSERT(passes_[segment].sums < sums_max_);
    ++passes_[segment].sums;
}

bool DigestPasses::add(uint32_t segment, const StagedStretch& stretch, std::span<const Piece> pieces, Address staged) {
    Pass& pass = passes_[segment];
    DigestPiece* const list = reinterpret_cast<DigestPiece*>(lists_.data()) + uint64_t{segment} * pieces_max_;
    Lister lister{list + pass.pieces, list + pieces_max_, static_cast<unsigned short>(pass.sums - 1)};
    const bool fits = list_stretch(lister, stretch, pieces, staged);
    pass.pieces = static_cast<uint32_t>(lister.next - list);
    return fits;
}

void DigestPasses::launch(uint32_t segment, const Kernels& kernels, const DigestTables& tables, const Stream& stream) {
    Pass& pass = passes_[segment];
    const uint64_t bytes = sums_max_ * sizeof(DigestShares);
    std::byte* const seen = seen_.data() + segment * bytes;
    const Address shares = shares_.address() + segment * bytes;
    const Driver& driver = shares_.driver();
    if (!pass.zeroed) driver.copy(Way::TO_DEVICE, seen, shares, bytes, stream.get());  // nothing was seen yet
    pass.zeroed = true;
    const Address list = lists_.address() + uint64_t{segment} * pieces_max_ * sizeof(DigestPiece);
    kernels.digest(list, pass.pieces, tables, shares, stream);
    driver.copy(Way::TO_HOST, seen, shares, pass.sums * sizeof(DigestShares), stream.get());
}

std::vector<DigestSum> DigestPasses::sums(uint32_t segment) const {
    const Pass& pass = passes_[segment];
    const std::span<const DigestShares> after = shares_of(segment);
    std::vector<DigestSum> sums;
    sums.reserve(after.size());
    for (size_t index = 0; index < after.size(); ++index) {
        const DigestShares& before = pass.before[index];
        sums.push_back(digest_sum(
            {after[index].low - before.low, after[index].high - before.high, after[index].bytes - before.bytes}));
    }
    return sums;
}

std::span<DigestShares> DigestPasses::shares_of(uint32_t segment) const {
    auto* const shares = reinterpret_cast<DigestShares*>(seen_.data()) + uint64_t{segment} * sums_max_;
    return {shares, passes_[segment].sums};
}

}  // namespace kv::gpu
