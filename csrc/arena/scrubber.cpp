#include "arena/scrubber.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <utility>

#include "base/check.h"

namespace kv {
namespace {

constexpr size_t PIECE_BYTES = 256 << 10;  // fits the cache

constexpr int NICENESS = 19;  // the lowest priority

// The bytes that were read; fewer when the read failed or the file is shorter.
size_t read_from(int fd, std::byte* target, size_t bytes, uint64_t offset) {
    size_t done = 0;
    while (done < bytes) {
        const ssize_t count = ::pread(fd, target + done, bytes - done, static_cast<off_t>(offset + done));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) break;
        done += static_cast<size_t>(count);
    }
    return done;
}

}  // namespace

Scrubber::Scrubber(int arena_fd, uint64_t arena_bytes, int ledger_fd, uint64_t ledger_bytes)
    : arena_bytes_(arena_bytes),
      arena_(duplicate(arena_fd, "the arena")),
      ledger_(ledger_fd, ledger_bytes),
      piece_(PIECE_BYTES),
      threads_([this] {
          {
              const std::lock_guard lock(mutex_);
              closing_ = true;
          }
          ready_.notify_all();
      }) {
    if (arena_bytes > ledger_bytes || arena_bytes > file_bytes(arena_fd)) {
        bad_argument(format("arena_bytes=%" PRIu64 " must be within the file and the ledger", arena_bytes));
    }
    threads_.start("kv-scrub", [this] { work(); });
}

void Scrubber::submit(uint64_t job, std::vector<ScrubItem> items) {
    for (const ScrubItem& item : items) {
        const auto offset = static_cast<uint64_t>(item.arena_offset);  // negative ones become too large
        const bool inside = offset < arena_bytes_ && item.payload_bytes <= arena_bytes_ - offset;
        if (!inside || offset % SLOT_ALIGN != 0 || item.payload_bytes == 0) {
            bad_argument(format("%" PRIu64 " bytes at arena_offset=%" PRId64 " must be a slot in %" PRIu64 " bytes",
                                item.payload_bytes, item.arena_offset, arena_bytes_));
        }
    }
    {
        const std::lock_guard lock(mutex_);
        jobs_.push_back({job, std::move(items)});
    }
    ready_.notify_one();
}

void Scrubber::work() {
    lower_priority(NICENESS);
    std::unique_lock lock(mutex_);
    for (;;) {
        ready_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
        if (closing_) return;
        const Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        ScrubEnd end = verify(job);
        lock.lock();
        if (closing_) return;
        ends_.push(std::move(end));
    }
}

ScrubEnd Scrubber::verify(const Job& job) {
    ScrubEnd end{job.number, {}, 0};
    for (uint32_t index = 0; index < job.items.size() && !closing_; ++index) {
        if (!verify(job.items[index], end.bytes)) end.wrong.push_back(index);
    }
    return end;
}

bool Scrubber::verify(const ScrubItem& item, uint64_t& bytes) {
    const auto sums = ledger_.sums({&item.arena_offset, 1}, item.names);
    if (!sums) return false;
    if (sums->front() == NO_DIGEST) return true;
    const DigestSum read = sum_of(item);
    bytes += read.bytes;
    return read.bytes == item.payload_bytes && read.sum == sums->front();
}

DigestSum Scrubber::sum_of(const ScrubItem& item) {
    DigestSum sum;
    while (sum.bytes < item.payload_bytes && !closing_) {
        const size_t wanted = std::min<uint64_t>(piece_.size(), item.payload_bytes - sum.bytes);
        const uint64_t offset = static_cast<uint64_t>(item.arena_offset) + sum.bytes;
        const size_t count = read_from(arena_.get(), piece_.data(), wanted, offset);
        sum = sum + digest_sum({piece_.data(), count}, sum.bytes);
        if (count < wanted) break;
    }
    return sum;
}

}  // namespace kv
