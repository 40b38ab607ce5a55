// Carries out the items of one device on its own thread, so that a device that stalls does not delay others.
//
// Threads: any thread may call the public methods; everything private except the inbox belongs to the lane's thread.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/threads.h"
#include "disk/item.h"
#include "disk/store.h"

namespace kv::disk {

class Lane {
  public:
    // depth: payloads under way. The io takes requests_max(depth) requests. sum_threads and ends must outlive the lane.
    Lane(std::shared_ptr<Store> store, std::unique_ptr<Io> io, unsigned depth, std::byte* arena, Crew& sum_threads,
         Ends& ends);
    ~Lane() { close(); }

    static unsigned requests_max(unsigned depth) { return ACTIVE_PER_DEPTH * depth; }

    const Geometry& geometry() const { return store_->geometry(); }
    void submit(std::vector<ItemPointer> items);
    void cancel(uint64_t job);
    void register_memory(uint64_t begin, uint64_t end);
    uint64_t registered_bytes() const { return registered_bytes_.load(std::memory_order_relaxed); }
    // Cancels items that have not begun, waits for the others, joins.
    void close();

  private:
    // Bound on items that have begun, as a multiple of the depth: some withdraw or seal while others transfer payloads.
    static constexpr unsigned ACTIVE_PER_DEPTH = 4;

    struct Inbox {
        std::vector<ItemPointer> items;
        std::vector<Item*> summed;
        std::vector<uint64_t> cancelled;
        std::vector<std::pair<uint64_t, uint64_t>> memory;
        bool closing = false;
    };

    void run();
    bool take_inbox();
    void cancel_queued(const std::function<bool(const Item&)>& is_meant);
    void register_next();
    void begin_items(std::list<ItemPointer>& queue);
    bool has_room(Kind kind) const;
    bool can_begin(const Item& item) const;
    void begin(Item& item);
    void form(Item& item);
    void formed(Item& item);
    void prepare_write(Item& item);
    void withdraw(Item& item);
    void withdrawn(Item& item);
    void wait_for_move(Item& item);
    void begin_moves();
    void move(Item& item);
    void moved(Item& item);
    void sum(Item& item);
    void start_summing();
    bool has_sum(Item& item);
    void summed(Item& item);
    bool has_right_bytes(const Item& item) const;
    void seal(Item& item);
    void sealed(Item& item);
    void request_ended(Item& item);
    void write_entry(Item& item, uint64_t offset, const Entry& entry);
    void begin_entries();
    bool succeeded(Item& item);
    void end(Item& item, Outcome outcome);
    void report(const Item& item);

    SegmentState& segment_of(const Item& item) { return store_->segments()[item.place.segment]; }
    const SegmentState& segment_of(const Item& item) const { return store_->segments()[item.place.segment]; }
    ExtentState& extent_of(const Item& item) { return segment_of(item).extents[item.place.position]; }
    const ExtentState& extent_of(const Item& item) const { return segment_of(item).extents[item.place.position]; }
    bool serves(const Item& item) const { return segment_of(item).extent_bytes == item.record.extent_bytes(); }

    const std::shared_ptr<Store> store_;
    const std::unique_ptr<Io> io_;
    const unsigned depth_;
    std::byte* const arena_;
    Crew& sum_threads_;
    Ends& ends_;
    std::atomic<uint64_t> registered_bytes_ = 0;

    std::mutex mutex_;  // guards inbox_
    Inbox inbox_;

    bool closing_ = false;
    std::list<ItemPointer> reads_;  // not begun, like writes_
    std::list<ItemPointer> writes_;
    std::unordered_map<Item*, ItemPointer> active_;
    unsigned reads_active_ = 0;
    std::deque<Item*> reads_waiting_;  // for their turn at the device
    std::deque<Item*> writes_waiting_;
    unsigned moving_ = 0;
    unsigned reads_in_a_row_ = 0;  // reads begun at the device since the last write
    std::vector<Item*> entries_waiting_;
    std::vector<Crew::Task> to_sum_;
    std::deque<std::pair<uint64_t, uint64_t>> memory_;

    std::thread thread_;
};

}  // namespace kv::disk
