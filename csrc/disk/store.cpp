#include "disk/store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/check.h"

namespace kv::disk {
namespace {

constexpr unsigned RECOVERY_DEPTH = 16;
constexpr uint64_t PIECE_ENTRIES = 256;  // of a table, read at once and lost together if a block is unreadable

}  // namespace

// Consecutive entries of one table; `first` counts from its label.
struct Store::Piece {
    uint64_t segment;
    uint64_t first;
    uint64_t entries;
};

Store::Store(const std::string& directory, StoreFiles files, uint32_t device, std::shared_ptr<Faults> faults)
    : directory_(directory),
      device_(device),
      files_(std::move(files)),
      faults_(std::move(faults)),
      segments_(files_.geometry.segments) {}

void Store::flush() {
    for (const Descriptor* file : {&files_.payloads, &files_.headers}) {
        if (::fdatasync(file->get()) != 0) throw_errno("fdatasync of the store in " + directory_);
    }
    if (faults_ != nullptr) faults_->flushed();
}

std::unique_ptr<Io> Store::open_io(Choice choice, IoBounds bounds, std::string& backend) const {
    std::string why;
    const Files files{files_.payloads.get(), files_.headers.get()};
    std::unique_ptr<Io> io = choice == Choice::THREADS ? nullptr : open_uring(files, bounds.requests, why);
    if (io == nullptr) {
        if (choice == Choice::URING) throw Refusal("disk-engine", "no io_uring: " + why);
        io = open_threads(files, bounds.threads);
    }
    backend = why.empty() ? io->name() : io->name() + " (io_uring: " + why + ")";
    return with_faults(std::move(io), faults_);
}

std::vector<DiskRecord> Store::recover(Choice choice) {
    damaged_ = unreadable_ = 0;
    segments_.assign(files_.geometry.segments, {});
    read_labels(choice);
    std::vector<DiskRecord> records;
    read_tables(choice, records);
    const auto by_extent = [](const DiskRecord& a, const DiskRecord& b) { return a.extent < b.extent; };
    std::sort(records.begin(), records.end(), by_extent);
    return records;
}

// Visits each piece once, in any order; with nullptr if it could not be read whole.
void Store::read_all(Choice choice, const std::vector<Piece>& pieces,
                     const std::function<void(const Piece&, const Entry*)>& visit) {
    struct Reading : Request {
        const Piece* piece;
        std::vector<Entry> entries;
    };
    std::vector<Reading> readings(std::min<size_t>(RECOVERY_DEPTH, pieces.size()));  // outlive the io
    std::string backend;
    const std::unique_ptr<Io> io = open_io(choice, {RECOVERY_DEPTH, RECOVERY_DEPTH}, backend);
    auto next = pieces.begin();
    const auto begin = [&](Reading& reading) {
        reading.piece = &*next++;
        reading.entries.resize(reading.piece->entries);
        const uint64_t table = files_.geometry.label_offset(reading.piece->segment);
        static_cast<Request&>(reading) = {Direction::READ, File::HEADERS, table + reading.piece->first * ENTRY_BYTES,
                                          reading.entries.front().bytes,
                                          static_cast<uint32_t>(reading.entries.size() * ENTRY_BYTES)};
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
            visit(*reading.piece, whole ? reading.entries.data() : nullptr);
            if (next != pieces.end()) begin(reading);
        }
    }
}

void Store::read_labels(Choice choice) {
    const Geometry& geometry = files_.geometry;
    std::vector<Piece> pieces;
    for (uint64_t segment = 0; segment < geometry.segments; ++segment) pieces.push_back({segment, 0, 1});
    read_all(choice, pieces, [&](const Piece& piece, const Entry* entry) {
        if (entry == nullptr) {
            ++unreadable_;
            return;
        }
        SegmentLabel label{};
        const Found found = decode(*entry, files_.store, piece.segment, label);
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

void Store::read_tables(Choice choice, std::vector<DiskRecord>& records) {
    std::vector<Piece> pieces;
    for (uint64_t segment = 0; segment < segments_.size(); ++segment) {
        const uint64_t positions = segments_[segment].extents.size();
        for (uint64_t first = 0; first < positions; first += PIECE_ENTRIES) {
            pieces.push_back({segment, 1 + first, std::min(PIECE_ENTRIES, positions - first)});
        }
    }
    read_all(choice, pieces, [&](const Piece& piece, const Entry* entries) {
        for (uint64_t i = 0; i < piece.entries; ++i) {
            const Place place{piece.segment, piece.first - 1 + i};
            if (entries != nullptr) {
                take_header(entries[i], place, records);
            } else {
                ++unreadable_;
                // A header there may be readable and valid another time, so a write must withdraw it first.
                segments_[place.segment].extents[place.position].header_found = true;
            }
        }
    });
}

void Store::take_header(const Entry& entry, Place place, std::vector<DiskRecord>& records) {
    SegmentState& segment = segments_[place.segment];
    ExtentState& extent = segment.extents[place.position];
    Sealed sealed{};
    const SegmentLabel label{place.segment, segment.extent_bytes, segment.epoch};
    const Found found = decode(entry, files_.store, label, place, sealed);
    // Even a header that looks damaged now may be read as valid another time.
    extent.header_found = found != Found::EMPTY;
    if (found == Found::DAMAGED) ++damaged_;
    if (found != Found::RECORD) return;
    const LedgerRecord& shard = sealed.record.shard;
    extent.generation = shard.generation;
    extent.identity = identity_of(shard);
    extent.digest = sealed.digest;
    extent.payload_bytes = shard.payload_bytes;
    sealed.record.extent = files_.geometry.extent(place, segment.extent_bytes);
    sealed.record.device = device_;
    records.push_back(sealed.record);
}

}  // namespace kv::disk
