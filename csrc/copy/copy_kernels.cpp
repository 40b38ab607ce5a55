#include "copy/copy_kernels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/digest.h"
#include "base/prefault.h"
#include "base/shared_memory.h"
#include "base/threads.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kv {
namespace {

constexpr size_t LINE_BYTES = ReadAhead::LINE_BYTES;
constexpr size_t STEP_BYTES = 4 * LINE_BYTES;

// Reading ahead raised 2 KiB pages of a pool that a request covers in part from 8 to 11 GB/s, and contiguous bytes from
// 16.5 to 18.
constexpr size_t AHEAD_BYTES = 4096;

// Mean size of copies from which memcpy's own reading ahead suffices.
constexpr size_t SMALL_COPY_BYTES = 8192;

bool are_small(std::span<const Copy> copies) {
    size_t bytes = 0;
    for (const Copy& copy : copies) bytes += copy.bytes;
    return bytes < SMALL_COPY_BYTES * copies.size();
}

void copy_through_cache(std::span<const Copy> copies) {
    ReadAhead reading(are_small(copies) ? copies : std::span<const Copy>(), AHEAD_BYTES);
    for (const Copy& copy : copies) {
        reading.keep_up(copy.bytes);  // before memcpy, which has no hook in its middle
        std::memcpy(copy.target, copy.source, copy.bytes);
    }
}

#if defined(__SSE2__)

// SSE2 is part of the x86-64 baseline. AVX2 was measured to be no faster: a non-temporal copy waits for memory, and a
// line's four stores are combined before they leave.
constexpr const char* PAST_CACHE_NAME = "non-temporal";

void stream_step(std::byte* target, const std::byte* source) {
    auto* to = reinterpret_cast<__m128i*>(target);
    const auto* from = reinterpret_cast<const __m128i*>(source);
    for (size_t line = 0; line < STEP_BYTES / LINE_BYTES; ++line, to += 4, from += 4) {
        const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
}

// Nothing else orders non-temporal stores.
void fence_streams() { _mm_sfence(); }

// Edges that are not whole steps go through the cache.
void copy_past_cache(std::span<const Copy> copies) {
    ReadAhead reading(copies, AHEAD_BYTES);
    for (const Copy& copy : copies) {
        const size_t misaligned = -reinterpret_cast<uintptr_t>(copy.target) % LINE_BYTES;
        size_t at = std::min(misaligned, copy.bytes);
        std::memcpy(copy.target, copy.source, at);
        for (; copy.bytes - at >= STEP_BYTES; at += STEP_BYTES) {
            for (size_t line = 0; line < STEP_BYTES; line += LINE_BYTES) reading.fetch_line();
            stream_step(copy.target + at, copy.source + at);
        }
        reading.keep_up(copy.bytes);
        if (at < copy.bytes) std::memcpy(copy.target + at, copy.source + at, copy.bytes - at);
    }
    fence_streams();
}

#else

void fence_streams() {}

constexpr const char* PAST_CACHE_NAME = "memcpy";

void copy_past_cache(std::span<const Copy> copies) { copy_through_cache(copies); }

#endif

}  // namespace

void run_copies(std::span<const Copy> copies, Through through) {
    if (through == Through::CACHE) {
        copy_through_cache(copies);
    } else {
        copy_past_cache(copies);
    }
    std::atomic_thread_fence(std::memory_order_release);
}

void run_summed_copies(std::span<const Copy> copies, std::span<uint64_t> sums, Through through) {
    digest_copies(copies, sums, through);
    fence_streams();
    std::atomic_thread_fence(std::memory_order_release);
}

std::string copy_variant() { return PAST_CACHE_NAME; }

double copy_seconds(int source_fd, int target_fd, size_t bytes, int threads, Through through) {
    check_range("threads", threads, 1, 1024);
    for (const int fd : {source_fd, target_fd}) {
        if (file_bytes(fd) < bytes) bad_argument(format("descriptor %d holds less than %zu bytes", fd, bytes));
    }
    const Mapping source(source_fd, bytes, "the source"), target(target_fd, bytes, "the target");
    fault_in(source.data(), bytes);
    fault_in(target.data(), bytes);

    // Each thread reads the clock itself: on a busy machine the waiting thread may be the last to run.
    using Clock = std::chrono::steady_clock;
    struct Span {
        Clock::time_point begin;
        Clock::time_point end;
    };
    std::vector<Span> spans(static_cast<size_t>(threads));
    std::atomic<bool> begun = false;
    const size_t share = (bytes / spans.size() + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    Threads workers([&] {
        begun = true;
        begun.notify_all();
    });
    for (size_t i = 0; i < spans.size(); ++i) {
        workers.start(format("kv-rate-%zu", i), [&, i] {
            const size_t begin = std::min(share * i, bytes);
            const size_t end = std::min(begin + share, bytes);
            const Copy copy{source.data() + begin, target.data() + begin, end - begin};
            begun.wait(false);
            spans[i].begin = Clock::now();
            run_copies({&copy, 1}, through);
            spans[i].end = Clock::now();
        });
    }
    workers.join();  // which has them begin
    const auto first = std::min_element(spans.begin(), spans.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
    const auto last = std::max_element(spans.begin(), spans.end(), [](auto& a, auto& b) { return a.end < b.end; });
    return std::chrono::duration<double>(last->end - first->begin).count();
}

}  // namespace kv
