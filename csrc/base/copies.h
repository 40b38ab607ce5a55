// Copies between mapped memory, for those who run them (copy/copy_kernels.h, base/digest.h).

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

struct Copy {
    const std::byte* source;
    std::byte* target;  // null: the bytes are only summed
    size_t bytes;
    uint64_t offset = 0;  // in its payload, for its sum
};

// Through the cache, or past it to memory.
enum class Through { CACHE, MEMORY };

// Fetches sources into the cache: small pages are scattered, and the processor's own prefetcher starts anew at each.
// Walks over the sources of a list of copies, line by line, some distance ahead of what is read. The list stays as it
// is meanwhile.
class ReadAhead {
  public:
    static constexpr size_t LINE_BYTES = 64;

    ReadAhead(std::span<const Copy> copies, size_t distance_bytes) : left_(copies) {
        if (!turn()) return;
        for (size_t bytes = 0; bytes < distance_bytes && !ended_; bytes += LINE_BYTES) fetch_line();
        fetched_ = 0;
    }

    // Call it for each line that was read.
    void fetch_line() {
        __builtin_prefetch(at_);
        at_ += LINE_BYTES;
        ++fetched_;
        if (at_ >= end_ && !turn()) at_ -= LINE_BYTES;
    }

    // Call it for each copy, in order: makes up for lines of it that fetch_line() was not called for.
    void keep_up(size_t bytes) {
        due_ += (bytes + LINE_BYTES - 1) / LINE_BYTES;
        while (fetched_ < due_ && !ended_) fetch_line();
    }

  private:
    bool turn() {
        ended_ = left_.empty();
        if (ended_) return false;
        at_ = left_.front().source;
        end_ = at_ + left_.front().bytes;
        left_ = left_.subspan(1);
        return true;
    }

    std::span<const Copy> left_;
    const std::byte* at_ = nullptr;
    const std::byte* end_ = nullptr;
    bool ended_ = false;
    size_t fetched_ = 0;  // lines
    size_t due_ = 0;
};

}  // namespace kv
