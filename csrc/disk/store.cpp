#include "disk/store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "check.h"

namespace kv::disk {
namespace {

constexpr unsigned RECOVERY_DEPTH = 16;
constexpr uint64_t PIECE_BLOCKS = 64;  // of a header table, read at once

}  // namespace

// Consecutive blocks of one segment; `first` counts from its label.
struct Store::Piece {
    uint64_t segment;
    uint64_t first;
    uint64_t blocks;
};

Store::Store(const FileOptions& options, uint32_t device, std::shared_ptr<Faults> faults)
    : directory_(options.directory),
      device_(device),
      file_(open_store_file(options)),
      faults_(std::move(faults)),
      segments_(file_.geometry.segments) {}

void Store::flush() {
    if (::fdatasync(file_.file.get()) != 0) throw_errno("fdatasync of the store in " + directory_);
    if (faults_ != nullptr) faults_->flushed();
}

std::unique_ptr<Io> Store::open_io(Choice choice, IoBounds bounds, std::string& backend) const {
    std::string why;
    std::unique_ptr<Io> io = choice == Choice::THREADS ? nullptr : open_uring(file_.file.get(), bounds.requests, why);
    if (io == nullptr) {
        if (choice == Choice::URING) throw Refusal("disk-engine", "no io_uring: " + why);
        io = open_threads(file_.file.get(), bounds.threads);
    }
    backend = why.empty() ? io->name() : io->name() + " (io_uring: " + why + ")";
    return with_faults(std::move(io), faults_);
}

std::vector<DiskRecord> Store::recover() {
    damaged_ = unreadable_ = 0;
    segments_.assign(file_.geometry.segments, {});
    read_labels();
    std::vector<DiskRecord> records;
    read_tables(records);
    const auto by_extent = [](const DiskRecord& a, const DiskRecord& b) { return a.extent < b.extent; };
    std::sort(records.begin(), records.end(), by_extent);
    return records;
}

// Visits each piece once, in any order; with nullptr for one that could not be read as a whole.
void Store::read_all(const std::vector<Piece>& pieces, const std::function<void(const Piece&, const Block*)>& visit) {
    struct Reading : Request {
        const Piece* piece;
        std::vector<Block> blocks;
    };
    std::string backend;
    const std::unique_ptr<Io> io = open_io(Choice::AUTO, {RECOVERY_DEPTH, RECOVERY_DEPTH}, backend);
    std::vector<Reading> readings(std::min<size_t>(RECOVERY_DEPTH, pieces.size()));
    auto next = pieces.begin();
    const auto begin = [&](Reading& reading) {
        reading.piece = &*next++;
        reading.blocks.resize(reading.piece->blocks);
        const Place first{reading.piece->segment, reading.piece->first};
        const uint64_t offset = file_.geometry.segment_offset(first.segment) + first.position * BLOCK_BYTES;
        static_cast<Request&>(reading) = {Direction::READ, offset, reading.blocks.front().bytes,
                                          static_cast<uint32_t>(reading.blocks.size() * BLOCK_BYTES)};
        io->submit(reading);
    };
    for (Reading& reading : readings) begin(reading);
    std::vector<Request*> ended;
    for (size_t left = pieces.size(); left > 0; left -= ended.size()) {
        ended.clear();
        io->collect(ended);
        for (Request* request : ended) {
            auto& reading = static_cast<Reading&>(*request);
            const bool whole = reading.result == reading.bytes;
            visit(*reading.piece, whole ? reading.blocks.data() : nullptr);
            if (next != pieces.end()) begin(reading);
        }
    }
}

void Store::read_labels() {
    const Geometry& geometry = file_.geometry;
    std::vector<Piece> pieces;
    for (uint64_t segment = 0; segment < geometry.segments; ++segment) pieces.push_back({segment, 0, 1});
    read_all(pieces, [&](const Piece& piece, const Block* block) {
        if (block == nullptr) {
            ++unreadable_;
            return;
        }
        SegmentLabel label{};
        const Found found = decode(*block, file_.store, piece.segment, label);
        if (found == Found::DAMAGED) ++damaged_;
        if (found != Found::RECORD) return;
        SegmentState& segment = segments_[piece.segment];
        segment.extent_bytes = label.extent_bytes;
        segment.epoch = label.epoch;
        segment.extents.resize(geometry.extents_per_segment(label.extent_bytes));
    });
    if (unreadable_ == geometry.segments) {
        throw std::system_error(EIO, std::generic_category(),
                                "no segment of the store in " + directory_ + " is readable");
    }
}

void Store::read_tables(std::vector<DiskRecord>& records) {
    std::vector<Piece> pieces;
    for (uint64_t segment = 0; segment < segments_.size(); ++segment) {
        const uint64_t positions = segments_[segment].extents.size();
        for (uint64_t first = 0; first < positions; first += PIECE_BLOCKS) {
            pieces.push_back({segment, 1 + first, std::min(PIECE_BLOCKS, positions - first)});
        }
    }
    read_all(pieces, [&](const Piece& piece, const Block* blocks) {
        for (uint64_t i = 0; i < piece.blocks; ++i) {
            const Place place{piece.segment, piece.first - 1 + i};
            if (blocks != nullptr) {
                take_header(blocks[i], place, records);
            } else {
                ++unreadable_;
                // Whatever lies there may be readable, and valid, another time: it must go before a payload does.
                segments_[place.segment].extents[place.position].header_found = true;
            }
        }
    });
}

void Store::take_header(const Block& block, Place place, std::vector<DiskRecord>& records) {
    SegmentState& segment = segments_[place.segment];
    ExtentState& extent = segment.extents[place.position];
    Sealed sealed{};
    const SegmentLabel label{place.segment, segment.extent_bytes, segment.epoch};
    const Found found = decode(block, file_.store, label, place, sealed);
    // Even what looks damaged now may be read as valid another time.
    extent.header_found = found != Found::EMPTY;
    if (found == Found::DAMAGED) ++damaged_;
    if (found != Found::RECORD) return;
    const LedgerRecord& shard = sealed.record.shard;
    extent.generation = shard.generation;
    extent.identity = identity_of(shard);
    extent.payload_hash = sealed.payload_hash;
    extent.payload_bytes = shard.payload_bytes;
    sealed.record.extent = file_.geometry.extent(place, segment.extent_bytes);
    sealed.record.device = device_;
    records.push_back(sealed.record);
}

}  // namespace kv::disk
