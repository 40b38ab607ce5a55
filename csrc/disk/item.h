// One item of an order on its way through a lane, and its completion.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/completion_queue.h"
#include "disk/format.h"
#include "disk/io.h"

namespace kv::disk {

enum class Kind { WRITE, READ, WITHDRAW };

enum class Outcome : uint16_t { DONE, IO_ERROR, CHECKSUM, STALE, SHORT, CANCELLED };

// A completion as Python unpacks it.
struct Completion {
    uint64_t job;
    uint32_t item;
    uint16_t outcome;
    uint16_t error;  // errno of an IO_ERROR
    uint64_t payload_bytes;
    uint64_t wait_ns;
    uint64_t io_ns;
    uint64_t sum;  // of a payload that was read (base/digest.h), else NO_DIGEST
};
static_assert(sizeof(Completion) == 48, "no padding: completions are packed");

// An item is also its own request: at most one is under way for it.
struct Item : Request {
    enum class Step {
        QUEUED,
        FORMING,      // a new label of its segment is being written
        WITHDRAWING,  // the extent's old header is being overwritten with zeros
        WAITING,      // for its turn at the device
        MOVING,       // its payload is being transferred
        SUMMING,      // only its sum is missing
        SEALING,      // its header is being written
        ENDING,       // over, but a thread still sums it
    };

    uint64_t job = 0;
    uint32_t index = 0;
    Kind kind = Kind::READ;
    DiskRecord record{};
    uint64_t expected_sum = NO_DIGEST;  // of a write; NO_DIGEST: any
    Place place{};

    // State shared by the thread that sums and the lane that needs the sum: the first of them leaves it for the other.
    enum class Sum {
        NONE,
        COMPUTING,
        AWAITED,  // the lane has nothing else to do for the item: the other thread hands it over
        READY,
    };

    Step step = Step::QUEUED;
    std::atomic<Sum> sum_state = Sum::NONE;
    uint64_t sum = 0;     // of the payload in the arena, when READY
    uint64_t digest = 0;  // from that sum and the record's name
    uint32_t moved = 0;   // bytes of the payload that were transferred
    uint64_t epoch = 0;   // of the label that is being written, while FORMING
    Entry entry;          // the label or header that is being written
    Outcome outcome = Outcome::DONE;
    int error = 0;
    uint64_t queued_ns = 0;
    uint64_t begun_ns = 0;
};

using ItemPointer = std::unique_ptr<Item>;

// The completions of the lanes' items, and the number of items left in each job.
class Ends {
  public:
    int eventfd() const { return completions_.eventfd(); }

    // bad_argument when a job of this number has items left.
    void expect(uint64_t job, size_t items);
    void push(const Completion& completion);
    std::vector<Completion> take(size_t most) { return completions_.take(most); }
    size_t items_left() const;

  private:
    CompletionQueue<Completion> completions_;
    mutable std::mutex mutex_;
    std::unordered_map<uint64_t, size_t> left_;
    size_t items_left_ = 0;
};

}  // namespace kv::disk
