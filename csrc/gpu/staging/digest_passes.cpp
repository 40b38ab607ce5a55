#include "gpu/staging/digest_passes.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"

namespace kv::gpu {
namespace {

uint64_t bytes_of_totals(uint32_t sums) { return sizeof(uint64_t) + sums * sizeof(DigestShares); }

DeviceMemory take_totals(const Driver& driver, uint64_t bytes) {
    std::optional<DeviceMemory> memory = DeviceMemory::take(driver, bytes);
    if (!memory) {
        throw Refusal("device-memory", format("no %" PRIu64 " bytes of device memory are left for digests", bytes));
    }
    memory->fill(std::vector<std::byte>(bytes));
    return std::move(*memory);
}

// Writes a list, piece after piece.
struct Lister {
    DigestPiece* next;
    DigestPiece* const end;
    const unsigned short sum;

    bool add(Address from, Address to, uint64_t offset, uint64_t bytes) {
        if (next == end) return false;
        *next++ = {from, to, static_cast<unsigned>(offset), static_cast<unsigned short>(bytes), sum};
        return true;
    }
    bool add(const Piece& piece, uint64_t offset, const std::optional<PassCopy>& copy) {
        if (!copy) return add(piece.pool, 0, offset, piece.bytes);
        const Address staged = copy->segment + piece.staging;
        if (copy->way == Way::TO_HOST) return add(piece.pool, staged, offset, piece.bytes);
        return add(staged, piece.pool, offset, piece.bytes);
    }
};

// Lists bytes [begin, end) of the shard where they lie in staging.
bool list_staged(Lister& lister, const StagedStretch& stretch, uint64_t begin, uint64_t end, Address segment) {
    while (begin < end) {
        const uint64_t bytes = std::min<uint64_t>(end - begin, PIECE_BYTES_MAX);
        if (!lister.add(segment + stretch.staging + (begin - stretch.begin), 0, begin, bytes)) return false;
        begin += bytes;
    }
    return true;
}

// The pieces of a stretch come in the order of its bytes.
bool list_stretch(Lister& lister, const StagedStretch& stretch, std::span<const Piece> pieces,
                  const std::optional<PassCopy>& copy) {
    const bool rests = copy && copy->way == Way::TO_DEVICE;
    uint64_t at = stretch.begin;
    for (const Piece& piece : pieces) {
        const uint64_t offset = stretch.begin + (piece.staging - stretch.staging);
        if (rests && !list_staged(lister, stretch, at, offset, copy->segment)) return false;
        if (!lister.add(piece, offset, copy)) return false;
        at = offset + piece.bytes;
    }
    return !rests || list_staged(lister, stretch, at, stretch.end, copy->segment);
}

}  // namespace

DigestPasses::DigestPasses(const Driver& driver, uint32_t segments, uint32_t pieces_max, uint32_t sums_max)
    : pieces_max_(pieces_max),
      sums_max_(sums_max),
      totals_(take_totals(driver, segments * bytes_of_totals(sums_max))),
      reports_(driver, uint64_t{segments} * sums_max * sizeof(DigestReport)),
      lists_(driver, uint64_t{segments} * pieces_max * sizeof(DigestPiece)),
      passes_(segments) {
    KV_ASSERT(sums_max <= 1 + std::numeric_limits<decltype(DigestPiece::sum)>::max());
    std::memset(reports_.data(), 0, reports_.bytes());
}

void DigestPasses::begin(uint32_t segment) { passes_[segment].pieces = passes_[segment].sums = 0; }

void DigestPasses::begin_sum(uint32_t segment) {
    KV_ASSERT(passes_[segment].sums < sums_max_);
    ++passes_[segment].sums;
}

bool DigestPasses::add(uint32_t segment, const StagedStretch& stretch, std::span<const Piece> pieces,
                       const std::optional<PassCopy>& copy) {
    Pass& pass = passes_[segment];
    DigestPiece* const list = reinterpret_cast<DigestPiece*>(lists_.data()) + uint64_t{segment} * pieces_max_;
    Lister lister{list + pass.pieces, list + pieces_max_, static_cast<unsigned short>(pass.sums - 1)};
    const bool fits = list_stretch(lister, stretch, pieces, copy);
    pass.pieces = static_cast<uint32_t>(lister.next - list);
    return fits;
}

void DigestPasses::launch(uint32_t segment, const Kernels& kernels, const DigestTables& tables, const Stream& stream) {
    Pass& pass = passes_[segment];
    const Address counter = totals_.address() + segment * bytes_of_totals(sums_max_);
    const Address reports = reports_.address() + uint64_t{segment} * sums_max_ * sizeof(DigestReport);
    const Address list = lists_.address() + uint64_t{segment} * pieces_max_ * sizeof(DigestPiece);
    const DigestTotals totals = {counter + sizeof(uint64_t), counter, reports, ++pass.launch, pass.sums};
    kernels.digest(list, pass.pieces, tables, totals, stream);
}

std::vector<DigestSum> DigestPasses::sums(uint32_t segment) const {
    const Pass& pass = passes_[segment];
    const auto* const reports = reinterpret_cast<const DigestReport*>(reports_.data()) + uint64_t{segment} * sums_max_;
    std::vector<DigestSum> sums;
    sums.reserve(pass.sums);
    for (const DigestReport& report : std::span(reports, pass.sums)) {
        sums.push_back(report.launch == pass.launch ? digest_sum(report.shares) : DigestSum());
    }
    return sums;
}

}  // namespace kv::gpu
