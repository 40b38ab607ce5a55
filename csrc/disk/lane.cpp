#include "disk/lane.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstring>
#include <ctime>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/digest.h"

namespace kv::disk {
namespace {

// Items considered in one turn: those that cannot begin yet do not hold up the ones after them.
constexpr size_t LOOK_AHEAD = 64;

// Reads go first, since an engine waits for them. But writes have a deadline after which the mover is killed, and reads
// may go on for longer than that.
constexpr unsigned READS_TO_A_WRITE = 8;

uint64_t now_ns() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

uint64_t draw_epoch() {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
}

}  // namespace

Lane::Lane(std::shared_ptr<Store> store, std::unique_ptr<Io> io, unsigned depth, std::byte* arena, Crew& sum_threads,
           Ends& ends)
    : store_(std::move(store)),
      io_(std::move(io)),
      depth_(depth),
      arena_(arena),
      sum_threads_(sum_threads),
      ends_(ends) {
    thread_ = start_thread(format("kv-disk-%u", store_->device()), [this] { run(); });
}

// ------------------------------------------------------------------ any thread

void Lane::submit(std::vector<ItemPointer> items) {
    const uint64_t now = now_ns();
    {
        const std::lock_guard lock(mutex_);
        for (ItemPointer& item : items) {
            item->queued_ns = now;
            inbox_.items.push_back(std::move(item));
        }
    }
    io_->wake();
}

void Lane::cancel(uint64_t job) {
    {
        const std::lock_guard lock(mutex_);
        inbox_.cancelled.push_back(job);
    }
    io_->wake();
}

void Lane::register_memory(uint64_t begin, uint64_t end) {
    {
        const std::lock_guard lock(mutex_);
        inbox_.memory.emplace_back(begin, end);
    }
    io_->wake();
}

void Lane::close() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        inbox_.closing = true;
    }
    io_->wake();
    thread_.join();
}

// ------------------------------------------------------------------ the lane's thread

void Lane::run() {
    std::vector<Request*> ended;
    for (;;) {
        const bool closing = take_inbox();
        begin_moves();  // first, to make room for others to begin
        begin_items(reads_);
        begin_items(writes_);
        begin_moves();
        begin_entries();
        if (closing && active_.empty()) return;
        start_summing();
        register_next();
        ended.clear();
        io_->collect(ended);
        for (Request* request : ended) request_ended(static_cast<Item&>(*request));
    }
}

// Takes the inbox. Returns whether the lane is to end.
bool Lane::take_inbox() {
    Inbox inbox;
    {
        const std::lock_guard lock(mutex_);
        std::swap(inbox, inbox_);
        inbox_.closing = inbox.closing;
    }
    for (ItemPointer& item : inbox.items) {
        (item->kind == Kind::READ ? reads_ : writes_).push_back(std::move(item));
    }
    for (Item* item : inbox.summed) summed(*item);
    for (const uint64_t job : inbox.cancelled) cancel_queued([job](const Item& item) { return item.job == job; });
    if (inbox.closing) cancel_queued([](const Item&) { return true; });
    memory_.insert(memory_.end(), inbox.memory.begin(), inbox.memory.end());
    return inbox.closing;
}

void Lane::cancel_queued(const std::function<bool(const Item&)>& is_meant) {
    for (std::list<ItemPointer>* queue : {&reads_, &writes_}) {
        for (auto item = queue->begin(); item != queue->end();) {
            if (is_meant(**item)) {
                (*item)->begun_ns = now_ns();
                (*item)->outcome = Outcome::CANCELLED;
                report(**item);
                item = queue->erase(item);
            } else {
                ++item;
            }
        }
    }
}

// Registers one piece per turn: pinning it takes tens of milliseconds, and items wait meanwhile.
void Lane::register_next() {
    if (memory_.empty()) return;
    const auto [begin, end] = memory_.front();
    memory_.pop_front();
    if (io_->register_memory(arena_ + begin, end - begin)) {
        registered_bytes_ += end - begin;
    } else {
        memory_.clear();
    }
    if (!memory_.empty()) io_->wake();
}

// ------------------------------------------------------------------ beginning

// Begins items in order. If an item has to wait for others in its segment, later items there wait as well.
void Lane::begin_items(std::list<ItemPointer>& queue) {
    std::vector<uint64_t> blocked;
    size_t looked_at = 0;
    for (auto next = queue.begin(); next != queue.end() && looked_at < LOOK_AHEAD; ++looked_at) {
        if (!has_room((*next)->kind)) return;
        const auto here = next++;
        const uint64_t segment = (*here)->place.segment;
        const bool behind = std::find(blocked.begin(), blocked.end(), segment) != blocked.end();
        if (behind || !can_begin(**here)) {
            if (!behind) blocked.push_back(segment);
            continue;
        }
        Item& item = **here;
        reads_active_ += item.kind == Kind::READ;
        active_.emplace(&item, std::move(*here));
        queue.erase(here);
        begin(item);
    }
}

// Whether one more item may begin. Reads leave room for writes, which could not queue for the device otherwise.
bool Lane::has_room(Kind kind) const {
    const unsigned most = requests_max(depth_);
    return active_.size() < most && (kind != Kind::READ || reads_active_ < most - depth_);
}

bool Lane::can_begin(const Item& item) const {
    const SegmentState& segment = segment_of(item);
    if (segment.forming) return false;
    if (serves(item)) return !segment.extents[item.place.position].busy;
    return item.kind != Kind::WRITE || segment.busy == 0;
}

void Lane::begin(Item& item) {
    item.begun_ns = now_ns();
    ++segment_of(item).busy;
    if (item.kind == Kind::WRITE) {
        if (serves(item)) {
            prepare_write(item);
        } else {
            form(item);
        }
        return;
    }
    if (!serves(item) || !extent_of(item).holds(item.record.shard)) {
        end(item, Outcome::STALE);
        io_->wake();  // no request ends for it, and more items than LOOK_AHEAD may be queued
        return;
    }
    extent_of(item).busy = true;
    if (item.kind == Kind::READ) {
        wait_for_move(item);
    } else {
        extent_of(item).forget();
        withdraw(item);
    }
}

// Gives the segment another extent size. Its records are gone from here on, whether or not the label can be written.
void Lane::form(Item& item) {
    SegmentState& segment = segment_of(item);
    segment.forming = true;
    segment.extent_bytes = 0;
    segment.extents.clear();
    item.epoch = draw_epoch();
    item.step = Item::Step::FORMING;
    const SegmentLabel label{item.place.segment, item.record.extent_bytes(), item.epoch};
    write_entry(item, geometry().label_offset(item.place.segment), encode(store_->id(), label));
}

void Lane::formed(Item& item) {
    SegmentState& segment = segment_of(item);
    segment.forming = false;
    if (!succeeded(item)) return;
    segment.extent_bytes = item.record.extent_bytes();
    segment.epoch = item.epoch;
    segment.extents.assign(geometry().extents_per_segment(segment.extent_bytes), {});
    prepare_write(item);
}

void Lane::prepare_write(Item& item) {
    ExtentState& extent = extent_of(item);
    KV_ASSERT(!extent.busy);
    extent.busy = true;
    extent.forget();
    sum(item);
    if (extent.header_found) {
        withdraw(item);
    } else {
        wait_for_move(item);
    }
}

void Lane::withdraw(Item& item) {
    item.step = Item::Step::WITHDRAWING;
    write_entry(item, geometry().header_offset(item.place), Entry{});
}

void Lane::withdrawn(Item& item) {
    if (!succeeded(item)) return;
    extent_of(item).header_found = false;
    if (item.kind == Kind::WITHDRAW) {
        end(item, Outcome::DONE);
    } else {
        wait_for_move(item);
    }
}

// ------------------------------------------------------------------ payloads

void Lane::wait_for_move(Item& item) {
    item.step = Item::Step::WAITING;
    (item.kind == Kind::READ ? reads_waiting_ : writes_waiting_).push_back(&item);
}

void Lane::begin_moves() {
    while (moving_ < depth_ && !(reads_waiting_.empty() && writes_waiting_.empty())) {
        const bool is_writes_turn =
            reads_waiting_.empty() || (!writes_waiting_.empty() && reads_in_a_row_ >= READS_TO_A_WRITE);
        std::deque<Item*>& waiting = is_writes_turn ? writes_waiting_ : reads_waiting_;
        reads_in_a_row_ = is_writes_turn ? 0 : reads_in_a_row_ + 1;
        Item& item = *waiting.front();
        waiting.pop_front();
        ++moving_;
        item.step = Item::Step::MOVING;
        move(item);
    }
}

// Transfers the rest of the payload: a device may transfer less than it was asked to.
void Lane::move(Item& item) {
    const uint64_t offset = geometry().payload_offset(item.place, item.record.extent_bytes());
    static_cast<Request&>(item) = {item.kind == Kind::READ ? Direction::READ : Direction::WRITE, File::PAYLOADS,
                                   offset + item.moved, arena_ + item.record.shard.arena_offset + item.moved,
                                   static_cast<uint32_t>(item.record.payload_block_bytes() - item.moved)};
    io_->submit(item);
}

void Lane::moved(Item& item) {
    if (item.result > 0 && item.result < item.bytes) {
        const auto progress = static_cast<uint32_t>(item.result) / BLOCK_BYTES * BLOCK_BYTES;
        if (progress > 0) {
            item.moved += static_cast<uint32_t>(progress);
            move(item);
            return;
        }
    }
    --moving_;
    if (!succeeded(item)) return;
    item.step = Item::Step::SUMMING;
    if (item.kind == Kind::READ) sum(item);
    if (has_sum(item)) summed(item);
}

void Lane::sum(Item& item) {
    item.sum_state = Item::Sum::COMPUTING;
    to_sum_.push_back([this, &item] {
        const LedgerRecord& shard = item.record.shard;
        const DigestSum summed = digest_sum({arena_ + shard.arena_offset, shard.payload_bytes}, 0);
        item.sum = summed.sum;
        item.digest = payload_digest(summed, name_of(shard), shard.payload_bytes).value();
        if (item.sum_state.exchange(Item::Sum::READY) != Item::Sum::AWAITED) return;  // the lane may end it now
        {
            const std::lock_guard lock(mutex_);
            inbox_.summed.push_back(&item);
        }
        io_->wake();
    });
}

// Starts requests of the device before it wakes the threads that sum, which takes as long as a small request.
void Lane::start_summing() {
    if (to_sum_.empty()) return;
    io_->start();
    sum_threads_.add(to_sum_);
    to_sum_.clear();
}

// Whether no thread sums the item any more. If false, summed() is called later. To be called once per item.
bool Lane::has_sum(Item& item) {
    if (item.sum_state == Item::Sum::NONE) return true;
    return item.sum_state.exchange(Item::Sum::AWAITED) == Item::Sum::READY;
}

void Lane::summed(Item& item) {
    item.sum_state = Item::Sum::NONE;
    if (item.step == Item::Step::ENDING) {
        end(item, item.outcome);
    } else if (!has_right_bytes(item)) {
        end(item, Outcome::CHECKSUM);
    } else if (item.kind == Kind::WRITE) {
        seal(item);
    } else {
        end(item, Outcome::DONE);
    }
}

// A header vouches for its payload. So a slot that does not hold what an engine stored never gets one.
bool Lane::has_right_bytes(const Item& item) const {
    if (item.kind == Kind::READ) return item.digest == extent_of(item).digest;
    return item.expected_sum == NO_DIGEST || item.sum == item.expected_sum;
}

// ------------------------------------------------------------------ headers and ends

void Lane::seal(Item& item) {
    item.step = Item::Step::SEALING;
    item.record.stored_s = static_cast<uint32_t>(std::time(nullptr));
    const Sealed sealed{item.record, item.digest};
    extent_of(item).header_found = true;  // even if the write fails
    const Entry header = encode(store_->id(), segment_of(item).epoch, item.place, sealed);
    write_entry(item, geometry().header_offset(item.place), header);
}

void Lane::sealed(Item& item) {
    if (!succeeded(item)) return;
    const LedgerRecord& shard = item.record.shard;
    ExtentState& extent = extent_of(item);
    extent.generation = shard.generation;
    extent.identity = identity_of(shard);
    extent.digest = item.digest;
    extent.payload_bytes = shard.payload_bytes;
    end(item, Outcome::DONE);
}

void Lane::request_ended(Item& item) {
    switch (item.step) {
        case Item::Step::FORMING:
            return formed(item);
        case Item::Step::WITHDRAWING:
            return withdrawn(item);
        case Item::Step::MOVING:
            return moved(item);
        case Item::Step::SEALING:
            return sealed(item);
        case Item::Step::QUEUED:
        case Item::Step::WAITING:
        case Item::Step::SUMMING:
        case Item::Step::ENDING:
            KV_ASSERT(false);  // no request is under way in these steps
    }
}

void Lane::write_entry(Item& item, uint64_t offset, const Entry& entry) {
    item.entry = entry;
    static_cast<Request&>(item) = {Direction::WRITE, File::HEADERS, offset, item.entry.bytes, ENTRY_BYTES};
    entries_waiting_.push_back(&item);
}

// Submitted after payloads: the kernel gives each entry to a thread of its own, and no device waits for them.
void Lane::begin_entries() {
    for (Item* item : entries_waiting_) io_->submit(*item);
    entries_waiting_.clear();
}

// Whether the request transferred everything; otherwise the item ends.
bool Lane::succeeded(Item& item) {
    if (item.result == item.bytes) return true;
    if (item.result < 0) item.error = static_cast<int>(-item.result);
    end(item, item.result < 0 ? Outcome::IO_ERROR : Outcome::SHORT);
    return false;
}

void Lane::end(Item& item, Outcome outcome) {
    item.outcome = outcome;
    item.step = Item::Step::ENDING;
    if (!has_sum(item)) return;
    SegmentState& segment = segment_of(item);
    KV_ASSERT(segment.busy > 0);
    --segment.busy;
    if (serves(item) && outcome != Outcome::STALE) extent_of(item).busy = false;
    report(item);
    reads_active_ -= item.kind == Kind::READ;
    active_.erase(&item);
}

void Lane::report(const Item& item) {
    const uint64_t now = now_ns();
    const bool done = item.outcome == Outcome::DONE;
    ends_.push({item.job, item.index, static_cast<uint16_t>(item.outcome), static_cast<uint16_t>(item.error),
                done ? item.record.shard.payload_bytes : 0, item.begun_ns - item.queued_ns, now - item.begun_ns,
                done && item.kind == Kind::READ ? item.sum : NO_DIGEST});
}

}  // namespace kv::disk
