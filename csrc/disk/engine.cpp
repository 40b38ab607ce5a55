#include "disk/engine.h"

#include <algorithm>
#include <cinttypes>
#include <limits>
#include <utility>

#include "base/check.h"

namespace kv::disk {
namespace {

constexpr unsigned DEPTH_MAX = 1024;
constexpr unsigned HASH_THREADS_MAX = 64;
constexpr size_t ITEMS_MAX = size_t{1} << 20;  // in all jobs that are under way

constexpr uint64_t REGISTERED_PIECE_BYTES_MAX = uint64_t{1} << 30;  // the kernel's own bound

void check(const EngineOptions& options) {
    if (options.depth < 1 || options.depth > DEPTH_MAX) {
        bad_argument(format("depth=%u must be in [1, %u]", options.depth, DEPTH_MAX));
    }
    if (options.hash_threads < 1 || options.hash_threads > HASH_THREADS_MAX) {
        bad_argument(format("hash_threads=%u must be in [1, %u]", options.hash_threads, HASH_THREADS_MAX));
    }
    const uint64_t piece = options.registered_piece_bytes;
    if (piece == 0 || piece % SLOT_ALIGN != 0 || piece > REGISTERED_PIECE_BYTES_MAX) {
        bad_argument(format("registered_piece_bytes=%" PRIu64 " must be a multiple of %" PRIu64 " in [1, %" PRIu64 "]",
                            piece, SLOT_ALIGN, REGISTERED_PIECE_BYTES_MAX));
    }
}

// A few more threads than payloads, for the headers that are written meanwhile.
IoBounds bounds_for(unsigned depth) { return {Lane::requests_max(depth), depth + 1 + depth / 4}; }

}  // namespace

Engine::Engine(int arena_fd, const EngineOptions& options, std::vector<std::shared_ptr<Store>> stores)
    : registered_piece_bytes_(options.registered_piece_bytes) {
    disk::check(options);
    const uint64_t present = file_bytes(arena_fd);
    if (present < options.arena_bytes) {
        bad_argument(format("arena_bytes=%" PRIu64 " must be in (0, file=%" PRIu64 "]", options.arena_bytes, present));
    }
    arena_ = Mapping(arena_fd, options.arena_bytes, "the arena");
    arena_.prefer_huge_pages();
    hashers_.emplace(options.hash_threads);
    stores_.resize(DEVICES_MAX);
    lanes_.resize(DEVICES_MAX);
    bool direct = true;
    for (std::shared_ptr<Store>& store : stores) {
        const uint32_t device = store->device();
        if (stores_[device] != nullptr) bad_argument(format("two stores have device=%u", device));
        std::unique_ptr<Io> io = store->open_io(options.choice, bounds_for(options.depth), backend_);
        lanes_[device] = std::make_unique<Lane>(store, std::move(io), options.depth, arena_.data(), *hashers_, ends_);
        direct = direct && store->direct();
        stores_[device] = std::move(store);
    }
    backend_ += format(", depth %u, %s", options.depth, direct ? "O_DIRECT" : "through the page cache");
}

Engine::~Engine() { close(); }

void Engine::arena_ready(uint64_t bytes) {
    if (bytes > arena_.bytes()) {
        bad_argument(format("bytes=%" PRIu64 " must be in [0, arena=%" PRIu64 "]", bytes, arena_.bytes()));
    }
    while (arena_told_ < bytes) {
        const uint64_t end = std::min(arena_told_ + registered_piece_bytes_, arena_.bytes());
        if (end > bytes) return;  // only whole pieces are registered
        for (const std::unique_ptr<Lane>& lane : lanes_) {
            if (lane != nullptr) lane->register_memory(arena_told_, end);
        }
        arena_told_ = end;
    }
}

uint64_t Engine::registered_bytes() const {
    uint64_t fewest = std::numeric_limits<uint64_t>::max();
    for (const std::unique_ptr<Lane>& lane : lanes_) {
        if (lane != nullptr) fewest = std::min(fewest, lane->registered_bytes());
    }
    return fewest == std::numeric_limits<uint64_t>::max() ? 0 : fewest;
}

Store& Engine::checked_store(const DiskRecord& record) const {
    if (record.device >= stores_.size() || stores_[record.device] == nullptr) {
        bad_argument(format("device=%u: there is no such store", record.device));
    }
    return *stores_[record.device];
}

void Engine::check(Kind kind, const DiskRecord& record) const {
    checked_store(record).geometry().place_of(record.extent, record.extent_bytes());
    const LedgerRecord& shard = record.shard;
    if (record.extent_bytes() > EXTENT_BYTES_MAX) {
        bad_argument(format("an extent of %" PRIu64 " bytes must have %" PRIu64 " at most", record.extent_bytes(),
                            EXTENT_BYTES_MAX));
    }
    if (shard.payload_bytes == 0 || shard.payload_bytes > record.extent_bytes() || shard.generation == 0) {
        bad_argument(format("payload_bytes=%u must be in [1, extent=%" PRIu64 "], generation=%" PRIu64 " above 0",
                            shard.payload_bytes, record.extent_bytes(), shard.generation));
    }
    if (kind == Kind::WITHDRAW) return;
    const auto slot = static_cast<uint64_t>(shard.arena_offset);  // negative ones become too large
    if (slot % SLOT_ALIGN != 0 || slot > arena_.bytes() || record.payload_block_bytes() > arena_.bytes() - slot) {
        bad_argument(format("arena_offset=%" PRId64 " of %" PRIu64 " bytes must be aligned to %" PRIu64
                            " and in the arena of %" PRIu64 " bytes",
                            shard.arena_offset, record.payload_block_bytes(), SLOT_ALIGN, arena_.bytes()));
    }
}

void Engine::submit(uint64_t job, Kind kind, const std::vector<DiskRecord>& records) {
    if (closed_) bad_argument("the engine is closed");
    if (records.empty()) bad_argument("a job has one record at least");
    if (records.size() > ITEMS_MAX - std::min(ITEMS_MAX, ends_.items_left())) {
        bad_argument(format("more than %zu items would be under way", ITEMS_MAX));
    }
    for (const DiskRecord& record : records) check(kind, record);
    ends_.expect(job, records.size());
    std::vector<std::vector<ItemPointer>> items(lanes_.size());
    for (uint32_t index = 0; index < records.size(); ++index) {
        const DiskRecord& record = records[index];
        auto item = std::make_unique<Item>();
        item->job = job;
        item->index = index;
        item->kind = kind;
        item->record = record;
        item->place = stores_[record.device]->geometry().place_of(record.extent, record.extent_bytes());
        items[record.device].push_back(std::move(item));
    }
    for (size_t device = 0; device < lanes_.size(); ++device) {
        if (!items[device].empty()) lanes_[device]->submit(std::move(items[device]));
    }
}

void Engine::cancel(uint64_t job) {
    for (const std::unique_ptr<Lane>& lane : lanes_) {
        if (lane != nullptr) lane->cancel(job);
    }
}

void Engine::close() {
    if (closed_) return;
    closed_ = true;
    for (const std::unique_ptr<Lane>& lane : lanes_) {
        if (lane != nullptr) lane->close();
    }
    hashers_.reset();  // before the lanes, which a hasher may still wake
    lanes_.clear();
    stores_.clear();
    arena_.unmap();
}

}  // namespace kv::disk
