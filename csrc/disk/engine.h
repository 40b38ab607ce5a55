// Moves records between the arena and the extents of stores: one lane a device, threads for checksums beside them.
//
// Threads: one thread calls the methods (the mover's loop). Nothing that it calls waits for a device, except close().
//
// Order: reads before writes and withdrawals, but for one write in nine; each kind in the order of submission within a
// segment.
//
// Ends: every submitted item gives exactly one completion. Until then its slot and its extent are in use.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/shared_memory.h"
#include "disk/hashers.h"
#include "disk/item.h"
#include "disk/lane.h"
#include "disk/store.h"

namespace kv::disk {

constexpr uint64_t REGISTERED_PIECE_BYTES = uint64_t{256} << 20;

struct EngineOptions {
    uint64_t arena_bytes;
    Choice choice;
    unsigned depth;
    unsigned hash_threads;
    // What io_uring registers at once; a request that lies in two pieces goes without.
    uint64_t registered_piece_bytes;
};

class Engine {
  public:
    // Maps the arena; the descriptor stays the caller's. recover() was called on every store that was not created.
    Engine(int arena_fd, const EngineOptions& options, std::vector<std::shared_ptr<Store>> stores);
    ~Engine();

    const std::string& backend() const { return backend_; }
    int eventfd() const { return ends_.eventfd(); }
    // The first `bytes` of the arena are real.
    void arena_ready(uint64_t bytes);
    // Of the lane that has fewest.
    uint64_t registered_bytes() const;

    // bad_argument, and no completion, when any record is not possible here.
    void submit(uint64_t job, Kind kind, const std::vector<DiskRecord>& records);
    void cancel(uint64_t job);
    std::vector<Completion> completions(size_t most) { return ends_.take(most); }
    void close();

  private:
    Store& checked_store(const DiskRecord& record) const;
    void check(Kind kind, const DiskRecord& record) const;

    const uint64_t registered_piece_bytes_;
    Mapping arena_;
    Ends ends_;
    std::string backend_;
    uint64_t arena_told_ = 0;                     // bytes
    std::vector<std::shared_ptr<Store>> stores_;  // by device; null where there is none
    std::optional<Hashers> hashers_;
    std::vector<std::unique_ptr<Lane>> lanes_;  // like stores_
    bool closed_ = false;
};

}  // namespace kv::disk
