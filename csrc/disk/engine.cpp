#include "disk/engine.h"

#include <algorithm>
#include <cinttypes>
#include <utility>

#include "base/check.h"

namespace kv::disk {
namespace {

constexpr unsigned DEPTH_MAX = 1024;
constexpr unsigned SUM_THREADS_MAX = 64;
constexpr size_t ITEMS_MAX = size_t{1} << 20;  // in all jobs that are under way

constexpr uint64_t REGISTERED_PIECE_BYTES_MAX = uint64_t{1} << 30;  // the kernel's own bound

void check(const EngineOptions& options) {
    check_range("depth", options.depth, 1, DEPTH_MAX);
    check_range("sum_threads", options.sum_threads, 1, SUM_THREADS_MAX);
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
    arena_ = map_arena(arena_fd, options.arena_bytes);
    if (options.ledger_fd >= 0) ledger_.emplace(options.ledger_fd, options.ledger_bytes);
    sum_threads_.emplace("kv-disk-sum", options.sum_threads);
    bool direct = true;
    for (const std::shared_ptr<Store>& store : stores) {
        const uint32_t device = store->device();
        if (lanes_.contains(device)) bad_argument(format("two stores have device=%u", device));
        std::unique_ptr<Io> io = store->open_io(options.choice, bounds_for(options.depth), backend_);
        lanes_.try_emplace(device, store, std::move(io), options.depth, arena_.data(), *sum_threads_, ends_);
        direct = direct && store->direct();
    }
    backend_ += format(", depth %u, %s", options.depth, direct ? "O_DIRECT" : "through the page cache");
}

void Engine::arena_ready(uint64_t bytes) {
    if (bytes > arena_.bytes()) {
        bad_argument(format("bytes=%" PRIu64 " must be in [0, arena=%" PRIu64 "]", bytes, arena_.bytes()));
    }
    while (arena_told_ < bytes) {
        const uint64_t end = std::min(arena_told_ + registered_piece_bytes_, arena_.bytes());
        if (end > bytes) return;  // only whole pieces are registered
        for (auto& [device, lane] : lanes_) lane.register_memory(arena_told_, end);
        arena_told_ = end;
    }
}

uint64_t Engine::registered_bytes() const {
    uint64_t fewest = lanes_.empty() ? 0 : arena_.bytes();
    for (const auto& [device, lane] : lanes_) fewest = std::min(fewest, lane.registered_bytes());
    return fewest;
}

std::pair<Lane&, Place> Engine::check(Kind kind, const DiskRecord& record) {
    const auto lane = lanes_.find(record.device);
    if (lane == lanes_.end()) bad_argument(format("device=%u: there is no such store", record.device));
    const Place place = lane->second.geometry().place_of(record.extent, record.extent_bytes());
    const LedgerRecord& shard = record.shard;
    if (record.extent_bytes() > EXTENT_BYTES_MAX) {
        bad_argument(format("an extent of %" PRIu64 " bytes must have %" PRIu64 " at most", record.extent_bytes(),
                            EXTENT_BYTES_MAX));
    }
    if (shard.payload_bytes == 0 || shard.payload_bytes > record.extent_bytes() || shard.generation == 0) {
        bad_argument(format("payload_bytes=%u must be in [1, extent=%" PRIu64 "], generation=%" PRIu64 " above 0",
                            shard.payload_bytes, record.extent_bytes(), shard.generation));
    }
    if (kind == Kind::WITHDRAW) return {lane->second, place};
    const auto slot = static_cast<uint64_t>(shard.arena_offset);  // negative ones become too large
    if (slot % SLOT_ALIGN != 0 || slot > arena_.bytes() || record.payload_block_bytes() > arena_.bytes() - slot) {
        bad_argument(format("arena_offset=%" PRId64 " of %" PRIu64 " bytes must be aligned to %" PRIu64
                            " and in the arena of %" PRIu64 " bytes",
                            shard.arena_offset, record.payload_block_bytes(), SLOT_ALIGN, arena_.bytes()));
    }
    return {lane->second, place};
}

void Engine::submit(uint64_t job, Kind kind, const std::vector<DiskRecord>& records) {
    if (closed_) bad_argument("the engine is closed");
    if (records.empty()) bad_argument("a job has one record at least");
    if (records.size() > ITEMS_MAX - std::min(ITEMS_MAX, ends_.items_left())) {
        bad_argument(format("more than %zu items would be under way", ITEMS_MAX));
    }
    std::map<Lane*, std::vector<ItemPointer>> items;
    for (uint32_t index = 0; index < records.size(); ++index) {
        const auto& [lane, place] = check(kind, records[index]);
        auto item = std::make_unique<Item>();
        item->job = job;
        item->index = index;
        item->kind = kind;
        item->record = records[index];
        item->place = place;
        if (kind == Kind::WRITE && ledger_) item->expected_sum = ledger_->sum_of(item->record.shard);
        items[&lane].push_back(std::move(item));
    }
    ends_.expect(job, records.size());
    for (auto& [lane, its] : items) lane->submit(std::move(its));
}

void Engine::cancel(uint64_t job) {
    for (auto& [device, lane] : lanes_) lane.cancel(job);
}

void Engine::close() {
    if (closed_) return;
    closed_ = true;
    for (auto& [device, lane] : lanes_) lane.close();
    sum_threads_.reset();  // before the lanes, which one of them may still wake
    lanes_.clear();
    arena_.unmap();
}

}  // namespace kv::disk
