// Reads slots of the arena in the background, and compares them with the ledger: what changed is found before anybody
// asks for it.
//
// Slots are read as a file. So this process maps no page for it, and a page that the kernel has taken out of use is a
// read that failed, and no fault.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "arena/ledger.h"
#include "base/completion_queue.h"
#include "base/shared_memory.h"
#include "base/threads.h"

namespace kv {

// A slot and its payload, as Python packs it. The caller keeps the slot until the job has ended.
struct ScrubItem {
    int64_t arena_offset;
    uint64_t payload_bytes;
    uint64_t names;  // names_hash() of this payload alone
};
static_assert(sizeof(ScrubItem) == 24, "no padding: items are packed");

struct ScrubEnd {
    uint64_t job;
    std::vector<uint32_t> wrong;  // items with other bytes than were stored, or that the ledger gives another name
    uint64_t bytes;               // that were compared, payloads without a known sum left out
};

// One thread calls the methods. Another one reads, at the lowest priority, one job after the other.
class Scrubber {
  public:
    // The descriptors stay the caller's.
    Scrubber(int arena_fd, uint64_t arena_bytes, int ledger_fd, uint64_t ledger_bytes);
    // The destructor ends after the read under way. Jobs that are left have no end.

    int eventfd() const { return ends_.eventfd(); }
    // Every job gives one end. bad_argument, without any, when an item is not in the arena.
    void submit(uint64_t job, std::vector<ScrubItem> items);
    std::vector<ScrubEnd> ends(size_t most) { return ends_.take(most); }

  private:
    struct Job {
        uint64_t number;
        std::vector<ScrubItem> items;
    };

    void work();
    ScrubEnd verify(const Job& job);
    // False: it is wrong. Adds the bytes that were compared.
    bool verify(const ScrubItem& item, uint64_t& bytes);
    DigestSum sum_of(const ScrubItem& item);

    const uint64_t arena_bytes_;
    const Descriptor arena_;
    const Ledger ledger_;
    std::vector<std::byte> piece_;  // of the thread
    CompletionQueue<ScrubEnd> ends_;
    std::atomic<bool> closing_ = false;

    std::mutex mutex_;  // guards the jobs
    std::condition_variable ready_;
    std::deque<Job> jobs_;

    Threads threads_;
};

}  // namespace kv
