#include "copy_kernels.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "prefault.h"
#include "shared_memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kv {
namespace {

constexpr size_t LINE_BYTES = 64;
constexpr size_t STEP_BYTES = 4 * LINE_BYTES;

// How far the prefetches run ahead of the copying. Sources of small pages lie anywhere, so the processor's own
// prefetcher starts anew at each: without this, 2 KiB pages copy at 60-70 % of the contiguous speed.
constexpr size_t AHEAD_BYTES = 2048;

// Walks over the sources of a list of copies, some distance ahead of the copying.
class Prefetcher {
  public:
    explicit Prefetcher(std::span<const Copy> copies) : copies_(copies) {
        for (size_t ahead = 0; ahead < AHEAD_BYTES; ahead += STEP_BYTES) step();
    }

    // Prefetches the next STEP_BYTES.
    void step() {
        if (next_ == copies_.size()) return;
        const Copy& copy = copies_[next_];
        const std::byte* const from = copy.source + offset_;
        for (size_t line = 0; line < STEP_BYTES; line += LINE_BYTES) __builtin_prefetch(from + line, 0, 3);
        offset_ += STEP_BYTES;
        if (offset_ >= copy.bytes) {
            ++next_;
            offset_ = 0;
        }
    }

  private:
    std::span<const Copy> copies_;
    size_t next_ = 0;
    size_t offset_ = 0;
};

void copy_through_cache(std::span<const Copy> copies) {
    // memcpy has no hook for prefetches, so they come in front of each copy.
    Prefetcher prefetcher(copies);
    for (const Copy& copy : copies) {
        std::memcpy(copy.target, copy.source, copy.bytes);
        if (copy.bytes > 2 * AHEAD_BYTES) continue;
        for (size_t done = 0; done < copy.bytes; done += STEP_BYTES) prefetcher.step();
    }
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline void stream_step_avx2(std::byte* target, const std::byte* source) {
    auto* to = reinterpret_cast<__m256i*>(target);
    const auto* from = reinterpret_cast<const __m256i*>(source);
    for (int half = 0; half < 2; ++half, to += 4, from += 4) {
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
}

__attribute__((target("avx512f"))) inline void stream_step_avx512(std::byte* target, const std::byte* source) {
    auto* to = reinterpret_cast<__m512i*>(target);
    const auto* from = reinterpret_cast<const __m512i*>(source);
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 1);
    const __m512i c = _mm512_loadu_si512(from + 2), d = _mm512_loadu_si512(from + 3);
    _mm512_stream_si512(to, a);
    _mm512_stream_si512(to + 1, b);
    _mm512_stream_si512(to + 2, c);
    _mm512_stream_si512(to + 3, d);
}

// One text for both widths; each is compiled for its own processor. Edges that are no whole lines go through the cache.
#define KV_COPY_PAST_CACHE(name, stream_step)                                                 \
    void name(std::span<const Copy> copies) {                                                 \
        Prefetcher prefetcher(copies);                                                        \
        for (const Copy& copy : copies) {                                                     \
            const size_t misaligned = -reinterpret_cast<uintptr_t>(copy.target) % LINE_BYTES; \
            const size_t head = std::min(misaligned, copy.bytes);                             \
            std::memcpy(copy.target, copy.source, head);                                      \
            size_t at = head;                                                                 \
            for (; copy.bytes - at >= STEP_BYTES; at += STEP_BYTES) {                         \
                prefetcher.step();                                                            \
                stream_step(copy.target + at, copy.source + at);                              \
            }                                                                                 \
            if (at == copy.bytes) continue;                                                   \
            prefetcher.step();                                                                \
            std::memcpy(copy.target + at, copy.source + at, copy.bytes - at);                 \
        }                                                                                     \
        _mm_sfence(); /* non-temporal stores are ordered by nothing else */                   \
    }

__attribute__((target("avx2"))) KV_COPY_PAST_CACHE(copy_past_cache_avx2, stream_step_avx2)
    __attribute__((target("avx512f"))) KV_COPY_PAST_CACHE(copy_past_cache_avx512, stream_step_avx512)
#endif

        struct Variant {
    void (*past_cache)(std::span<const Copy>);
    const char* name;
};

Variant choose() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return {copy_past_cache_avx512, "avx512 non-temporal"};
    if (__builtin_cpu_supports("avx2")) return {copy_past_cache_avx2, "avx2 non-temporal"};
#endif
    return {copy_through_cache, "memcpy"};
}

const Variant& variant() {
    static const Variant chosen = choose();
    return chosen;
}

}  // namespace

void run_copies(std::span<const Copy> copies, Through through) {
    if (through == Through::CACHE) {
        copy_through_cache(copies);
    } else {
        variant().past_cache(copies);
    }
    std::atomic_thread_fence(std::memory_order_release);
}

std::string copy_variant() { return variant().name; }

double copy_seconds(int source_fd, int target_fd, size_t bytes, int threads, Through through) {
    if (threads < 1 || threads > 1024) bad_argument(format("threads=%d must be in [1, 1024]", threads));
    for (const int fd : {source_fd, target_fd}) {
        if (file_bytes(fd) < bytes) bad_argument(format("descriptor %d holds less than %zu bytes", fd, bytes));
    }
    const Mapping source(source_fd, bytes, "the source"), target(target_fd, bytes, "the target");
    fault_in(source.data(), bytes);
    fault_in(target.data(), bytes);

    // Each thread reads the clock itself: on a busy machine the one that waits may be the last to run.
    using Clock = std::chrono::steady_clock;
    struct Span {
        Clock::time_point begin;
        Clock::time_point end;
    };
    std::vector<Span> spans(static_cast<size_t>(threads));
    std::barrier start(threads);
    const size_t share = (bytes / spans.size() + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    std::vector<std::thread> workers;
    for (size_t i = 0; i < spans.size(); ++i) {
        workers.emplace_back([&, i] {
            const size_t begin = std::min(share * i, bytes);
            const size_t end = std::min(begin + share, bytes);
            const Copy copy{source.data() + begin, target.data() + begin, end - begin};
            start.arrive_and_wait();
            spans[i].begin = Clock::now();
            run_copies({&copy, 1}, through);
            spans[i].end = Clock::now();
        });
    }
    for (std::thread& worker : workers) worker.join();
    const auto first = std::min_element(spans.begin(), spans.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
    const auto last = std::max_element(spans.begin(), spans.end(), [](auto& a, auto& b) { return a.end < b.end; });
    return std::chrono::duration<double>(last->end - first->begin).count();
}

}  // namespace kv
