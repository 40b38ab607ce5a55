// Copies records between the arena and the extents of stores, with one lane per device and separate threads for the
// sums of payloads (base/digest.h).
//
// A payload gets its digest here, from the bytes in its slot. If the ledger has another sum for the slot, the write
// ends as CHECKSUM and no header is written. A read compares what it brought with the digest in the header.
//
// Threads: one thread calls the methods (the mover's loop). No call waits for a device, except close().
//
// Order: reads before writes and withdrawals, except for one write in nine; each kind in the order of submission within
// a segment.
//
// Ends: every submitted item gives exactly one completion. Until then its slot and its extent are in use.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arena/ledger.h"
#include "base/shared_memory.h"
#include "disk/item.h"
#include "disk/lane.h"
#include "disk/store.h"

namespace kv::disk {

constexpr uint64_t REGISTERED_PIECE_BYTES = uint64_t{256} << 20;

struct EngineOptions {
    uint64_t arena_bytes;
    Choice choice;
    unsigned depth;
    unsigned sum_threads;
    // Size of the arena's pieces that are registered with io_uring; a request that crosses two pieces does not use
    // them.
    uint64_t registered_piece_bytes;
    int ledger_fd = -1;         // -1: there is no ledger, and any bytes are written; for tools
    uint64_t ledger_bytes = 0;  // the arena_bytes of the ledger
};

class Engine {
  public:
    // Maps the arena and the ledger; the descriptors stay the caller's. recover() was called on every store that was
    // not created.
    Engine(int arena_fd, const EngineOptions& options, std::vector<std::shared_ptr<Store>> stores);
    ~Engine() { close(); }

    const std::string& backend() const { return backend_; }
    int eventfd() const { return ends_.eventfd(); }
    // The first `bytes` of the arena are touched.
    void arena_ready(uint64_t bytes);
    // The minimum over all lanes.
    uint64_t registered_bytes() const;

    // bad_argument, without any completion, when a record is invalid here.
    void submit(uint64_t job, Kind kind, const std::vector<DiskRecord>& records);
    void cancel(uint64_t job);
    std::vector<Completion> completions(size_t most) { return ends_.take(most); }
    void close();

  private:
    // The item's lane and its place there. bad_argument.
    std::pair<Lane&, Place> check(Kind kind, const DiskRecord& record);

    const uint64_t registered_piece_bytes_;
    Mapping arena_;
    Ends ends_;
    std::string backend_;
    uint64_t arena_told_ = 0;  // bytes
    std::optional<Ledger> ledger_;
    std::optional<Crew> sum_threads_;
    std::map<uint32_t, Lane> lanes_;  // by device number
    bool closed_ = false;
};

}  // namespace kv::disk
