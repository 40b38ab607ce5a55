#include "base/digest.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kv {
namespace {

static_assert(std::endian::native == std::endian::little, "words of a payload are little-endian");

__extension__ typedef unsigned __int128 Wide;

constexpr uint64_t P = DIGEST_PRIME;
// How far a sum fetches ahead of what it loads. 2 KiB and 4 KiB were slower.
constexpr size_t AHEAD_BYTES = 3072;
constexpr size_t WORD_BYTES = sizeof(uint32_t);
constexpr unsigned ENTRY_BITS = 60;
constexpr unsigned LIMB_BITS = 30;
constexpr uint64_t LIMB_MASK = (uint64_t{1} << LIMB_BITS) - 1;
constexpr size_t ENTRIES_OF_HASH = sizeof(Digest) / sizeof(uint64_t);

uint64_t reduced(Wide number) {
    const uint64_t sum = static_cast<uint64_t>(number & P) + static_cast<uint64_t>(number >> 61 & P) +
                         static_cast<uint64_t>(number >> 122);
    const uint64_t folded = (sum & P) + (sum >> 61);
    return folded < P ? folded : folded - P;
}

// ------------------------------------------------------------------ tables

// Entries of a table from 4 * `counter` on: the SHA-256 of its label and a counter gives four.
void make_entries(std::span<const char> label, uint32_t counter, std::span<uint64_t> entries) {
    for (size_t at = 0; at < entries.size(); at += ENTRIES_OF_HASH, ++counter) {
        const Digest hash =
            sha256(std::array{std::as_bytes(label), std::as_bytes(std::span<const uint32_t>(&counter, 1))});
        std::memcpy(&entries[at], hash.data(), sizeof hash);
        for (size_t i = 0; i < ENTRIES_OF_HASH; ++i) entries[at + i] &= (uint64_t{1} << ENTRY_BITS) - 1;
    }
}

std::span<const char> text_of(const char* text) { return {text, std::strlen(text)}; }

// The table B.
struct Columns {
    Columns() {
        make_entries(text_of("kvserver digest 1 B"), 0, whole);
        for (size_t word = 0; word < DIGEST_COLUMNS; ++word) {
            const size_t vector = word / 8 * 2 + word % 2;
            uint32_t* const lane = &limbs[vector * 8 + word % 8 / 2 * 2];
            lane[0] = static_cast<uint32_t>(whole[word] & LIMB_MASK);
            lane[1] = static_cast<uint32_t>(whole[word] >> LIMB_BITS);
            parted[word / STEP_WORDS * STEP_WORDS + word % 2 * 8 + word % STEP_WORDS / 2] = whole[word];
        }
    }

    static constexpr size_t STEP_WORDS = 16;  // 64 bytes, which vectors take at a time

    uint64_t whole[DIGEST_COLUMNS];
    // As AVX2 takes them: a vector for the even words of each half of a step, and one for its odd words. A lane holds
    // both limbs. A limb a lane, which needs no instruction to part them, takes 16 KiB: sums from memory were half as
    // fast.
    alignas(64) uint32_t limbs[2 * DIGEST_COLUMNS];
    // As AVX-512 takes them: the even words of each step, then its odd words.
    alignas(64) uint64_t parted[DIGEST_COLUMNS];
};

const Columns& columns() {
    static const Columns made;
    return made;
}

// The table A, made stretch by stretch: most payloads need a few entries of the million.
constexpr size_t ROWS_MAX = DIGEST_PAYLOAD_BYTES_MAX / DIGEST_ROW_BYTES;
constexpr size_t ROWS_OF_STRETCH = 4096;

uint64_t row_entry(size_t row) {
    static std::atomic<const uint64_t*> stretches[ROWS_MAX / ROWS_OF_STRETCH];
    static std::mutex making;
    auto& place = stretches[row / ROWS_OF_STRETCH];
    const uint64_t* stretch = place.load(std::memory_order_acquire);
    if (!stretch) {
        const std::lock_guard lock(making);
        stretch = place.load(std::memory_order_relaxed);
        if (!stretch) {
            auto made = std::make_unique<uint64_t[]>(ROWS_OF_STRETCH);
            const size_t first = row / ROWS_OF_STRETCH * ROWS_OF_STRETCH;
            make_entries(text_of("kvserver digest 1 A"), static_cast<uint32_t>(first / ENTRIES_OF_HASH),
                         {made.get(), ROWS_OF_STRETCH});
            stretch = made.release();
            place.store(stretch, std::memory_order_release);
        }
    }
    return stretch[row % ROWS_OF_STRETCH];
}

// ------------------------------------------------------------------ words of one row

// The way of bytes that were summed: none, or they are stored, through the cache or past it.
enum class Keep { NOT, STORED, STREAMED };

constexpr size_t STEP_BYTES = WORD_BYTES * Columns::STEP_WORDS;

// The sum of `steps` steps from column `first` on, a multiple of STEP_WORDS: word * B, modulo the prime and less than
// 2^102, as a row has 2^10 words. target: null with Keep::NOT.
using SumSteps = Wide (*)(const std::byte* data, size_t first, size_t steps, ReadAhead& reading, std::byte* target);

template <Keep keep>
Wide sum_words_portable(const std::byte* data, size_t first, size_t count, std::byte* target) {
    const uint64_t* const b = columns().whole + first;
    const auto product = [&](size_t i) {
        uint32_t word;
        std::memcpy(&word, data + WORD_BYTES * i, WORD_BYTES);
        if constexpr (keep != Keep::NOT) std::memcpy(target + WORD_BYTES * i, &word, WORD_BYTES);
        return static_cast<Wide>(b[i]) * word;
    };
    Wide evens = 0, odds = 0;  // one sum would have each word wait for the carry of the word before
    for (size_t i = 0; i + 1 < count; i += 2) {
        evens += product(i);
        odds += product(i + 1);
    }
    if (count % 2 == 1) evens += product(count - 1);
    return evens + odds;
}

template <Keep keep>
Wide sum_steps_portable(const std::byte* data, size_t first, size_t steps, ReadAhead&, std::byte* target) {
    return sum_words_portable<keep>(data, first, steps * Columns::STEP_WORDS, target);
}

#if defined(__x86_64__)

// The upper 32 bits of each lane in the lower ones' place.
__attribute__((target("avx2"))) inline __m256i upper_halves(__m256i lanes) {
    return _mm256_castps_si256(_mm256_movehdup_ps(_mm256_castsi256_ps(lanes)));
}

// Multiplies the lower 32 bits of each lane.
__attribute__((target("avx2"))) inline __m256i products(const __m256i (&words)[4], const __m256i (&limbs)[4]) {
    return _mm256_add_epi64(
        _mm256_add_epi64(_mm256_mul_epu32(words[0], limbs[0]), _mm256_mul_epu32(words[1], limbs[1])),
        _mm256_add_epi64(_mm256_mul_epu32(words[2], limbs[2]), _mm256_mul_epu32(words[3], limbs[3])));
}

// For 64 bytes, each lane adds four products of 32 and 30 bits to a group, which just fit into its 64 bits. The sum of
// all groups does not. So it is kept twice: modulo 2^64, and as a sum of the groups' upper six bits. The lower 58 bits
// of 64 groups together are less than 2^64, so that both give the sum itself.
//
// Slower from cache when measured: each group split into halves of 32 bits, three limbs of 20 bits, which never
// overflow, odd words by loads of their own.
constexpr unsigned TOP_SHIFT = 58;
static_assert(DIGEST_COLUMNS / Columns::STEP_WORDS <= 64);

// The sums of two times four lanes.
__attribute__((target("avx2"))) inline __m128i sums_of_lanes(__m256i one, __m256i other) {
    const __m256i pairs = _mm256_add_epi64(_mm256_unpacklo_epi64(one, other), _mm256_unpackhi_epi64(one, other));
    return _mm_add_epi64(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

// The rest of a lane beside its upper bits, modulo the prime: less than 2^61 + 8, so that four can be added.
__attribute__((target("avx2"))) inline __m256i rest_of_lanes(__m256i lanes, __m256i tops) {
    const __m256i rest = _mm256_sub_epi64(lanes, _mm256_slli_epi64(tops, TOP_SHIFT));
    return _mm256_add_epi64(_mm256_and_si256(rest, _mm256_set1_epi64x(P)), _mm256_srli_epi64(rest, 61));
}

// The whole sum, modulo the prime. tops: of `low` in numbers 0, 1, 4, 5, of `high` in the others.
__attribute__((target("avx2"))) inline Wide whole_sum(__m256i low, __m256i high, __m256i tops) {
    const __m256i tops_of_low = _mm256_unpacklo_epi32(tops, _mm256_setzero_si256());
    const __m256i tops_of_high = _mm256_unpackhi_epi32(tops, _mm256_setzero_si256());
    const __m128i rests = sums_of_lanes(rest_of_lanes(low, tops_of_low), rest_of_lanes(high, tops_of_high));
    const __m128i shifted = sums_of_lanes(tops_of_low, tops_of_high);
    const auto number = [](uint64_t top, uint64_t rest) { return (static_cast<Wide>(top) << TOP_SHIFT) + rest; };
    const auto first = [](__m128i lanes) { return static_cast<uint64_t>(_mm_cvtsi128_si64(lanes)); };
    const auto second = [&](__m128i lanes) { return first(_mm_unpackhi_epi64(lanes, lanes)); };
    return number(first(shifted), first(rests)) + (number(second(shifted), second(rests)) << LIMB_BITS);
}

template <Keep keep>
__attribute__((target("avx2"))) inline void store(std::byte* target, __m256i bytes) {
    if constexpr (keep == Keep::STREAMED) _mm256_stream_si256(reinterpret_cast<__m256i*>(target), bytes);
    if constexpr (keep == Keep::STORED) _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), bytes);
}

template <Keep keep>
__attribute__((target("avx2"))) Wide sum_steps_avx2(const std::byte* data, size_t first, size_t steps,
                                                    ReadAhead& reading, std::byte* target) {
    const auto* limbs = reinterpret_cast<const __m256i*>(columns().limbs + 2 * first);
    __m256i low = _mm256_setzero_si256(), high = low, tops = low;
    ReadAhead ahead = reading;  // in registers
    for (size_t step = 0; step < steps; ++step, data += STEP_BYTES, limbs += 4) {
        ahead.fetch_line();
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + 1);
        if constexpr (keep != Keep::NOT) {
            store<keep>(target, a);
            store<keep>(target + sizeof a, b);
            target += STEP_BYTES;
        }
        const __m256i words[] = {a, upper_halves(a), b, upper_halves(b)};
        const __m256i both[] = {limbs[0], limbs[1], limbs[2], limbs[3]};
        const __m256i lower = products(words, both);
        const __m256i upper = products(
            words, {upper_halves(both[0]), upper_halves(both[1]), upper_halves(both[2]), upper_halves(both[3])});
        low = _mm256_add_epi64(low, lower);
        high = _mm256_add_epi64(high, upper);
        const __m256i halves = _mm256_castps_si256(
            _mm256_shuffle_ps(_mm256_castsi256_ps(lower), _mm256_castsi256_ps(upper), 0xdd));  // the upper 32 bits
        tops = _mm256_add_epi32(tops, _mm256_srli_epi32(halves, TOP_SHIFT - 32));
    }
    reading = ahead;
    return whole_sum(low, high, tops);
}

__attribute__((target("avx512f"))) inline __m512i loaded(const void* from) {
    __m512i vector = _mm512_loadu_si512(from);
    __asm__("" : "+v"(vector));  // else a compiler has each use load it again
    return vector;
}

// Two vectors of eight words a step. A multiplication adds the lower or the upper 52 bits of a product; a lane takes
// 128 of them at most, which fit.
template <Keep keep>
__attribute__((target("avx512f,avx512ifma"))) Wide sum_steps_avx512(const std::byte* data, size_t first, size_t steps,
                                                                    ReadAhead& reading, std::byte* target) {
    constexpr unsigned HALF_BITS = 52;
    static_assert(2 * DIGEST_COLUMNS / Columns::STEP_WORDS < uint64_t{1} << (64 - HALF_BITS));
    const auto* entries = reinterpret_cast<const __m512i*>(columns().parted + first);
    const __m512i lower_words = _mm512_set1_epi64(0xffffffff);
    __m512i lows[2] = {}, highs[2] = {}, tops[2] = {};  // tops: of the entries' upper 8 bits
    ReadAhead ahead = reading;                          // in registers
    for (size_t step = 0; step < steps; ++step, data += STEP_BYTES, entries += 2) {
        ahead.fetch_line();
        const __m512i both = loaded(data);
        if constexpr (keep != Keep::NOT) {
            store<keep>(target, _mm512_castsi512_si256(both));  // in halves: AMD's processors stream them faster
            store<keep>(target + STEP_BYTES / 2, _mm512_extracti64x4_epi64(both, 1));
            target += STEP_BYTES;
        }
        const __m512i words[] = {_mm512_and_si512(both, lower_words), _mm512_srli_epi64(both, 32)};
        for (size_t half = 0; half < 2; ++half) {
            const __m512i entry = loaded(entries + half);
            lows[half] = _mm512_madd52lo_epu64(lows[half], words[half], entry);
            highs[half] = _mm512_madd52hi_epu64(highs[half], words[half], entry);
            tops[half] = _mm512_madd52lo_epu64(tops[half], words[half], _mm512_srli_epi64(entry, HALF_BITS));
        }
    }
    reading = ahead;
    const __m512i low = _mm512_add_epi64(lows[0], lows[1]);
    const __m512i high = _mm512_add_epi64(_mm512_add_epi64(highs[0], highs[1]), _mm512_add_epi64(tops[0], tops[1]));
    const auto total = static_cast<uint64_t>(_mm512_reduce_add_epi64(low));
    return (static_cast<Wide>(_mm512_reduce_add_epi64(high)) << HALF_BITS) + total;
}

template <Keep keep>
SumSteps fastest(DigestPath path) {
    if (path == DigestPath::BEST && __builtin_cpu_supports("avx512ifma")) return sum_steps_avx512<keep>;
    if (path != DigestPath::PORTABLE && __builtin_cpu_supports("avx2")) return sum_steps_avx2<keep>;
    return sum_steps_portable<keep>;
}

#else

template <Keep keep>
SumSteps fastest(DigestPath) {
    return sum_steps_portable<keep>;
}

#endif

SumSteps chosen(Keep keep, DigestPath path) {
    using Choices = std::array<SumSteps, 3>;
    const auto of_path = [](DigestPath one) {
        return Choices{fastest<Keep::NOT>(one), fastest<Keep::STORED>(one), fastest<Keep::STREAMED>(one)};
    };
    static const std::array choices{of_path(DigestPath::BEST), of_path(DigestPath::AVX2),
                                    of_path(DigestPath::PORTABLE)};
    return choices[static_cast<size_t>(path)][static_cast<size_t>(keep)];
}

// ------------------------------------------------------------------ bytes

// Bytes of one word from its byte `first` on, at their places in it. target: may be null.
uint64_t part_of_word(std::span<const std::byte> bytes, size_t first, std::byte* target) {
    uint64_t word = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
        const std::byte byte = bytes[i];
        word |= static_cast<uint64_t>(byte) << 8 * (first + i);
        if (target != nullptr) target[i] = byte;
    }
    return word;
}

std::byte* after(std::byte* target, size_t bytes) { return target == nullptr ? nullptr : target + bytes; }

// The rest of a stretch of one row: `data`, from byte `column` of the row on. target: may be null.
struct Stretch {
    std::span<const std::byte> data;
    size_t column;
    std::byte* target;

    void advance(size_t bytes) {
        data = data.subspan(bytes);
        column += bytes;
        target = after(target, bytes);
    }
};

// Sums the next bytes, which lie in one word.
Wide take_bytes(Stretch& left, size_t bytes) {
    const uint64_t word = part_of_word(left.data.first(bytes), left.column % WORD_BYTES, left.target);
    const Wide product = static_cast<Wide>(columns().whole[left.column / WORD_BYTES]) * word;
    left.advance(bytes);
    return product;
}

// Sums the next whole words.
Wide take_words(Stretch& left, size_t words) {
    const auto sum_words = left.target == nullptr ? sum_words_portable<Keep::NOT> : sum_words_portable<Keep::STORED>;
    const Wide sum = sum_words(left.data.data(), left.column / WORD_BYTES, words, left.target);
    left.advance(words * WORD_BYTES);
    return sum;
}

// Bytes and words before the first whole step and after the last one go the portable way.
Wide sum_row(Stretch left, SumSteps sum_steps, ReadAhead& reading) {
    Wide sum = 0;
    const auto until = [&](size_t unit) { return std::min(left.data.size(), -left.column % unit); };
    if (const size_t bytes = until(WORD_BYTES); bytes > 0) sum += take_bytes(left, bytes);
    if (const size_t words = until(STEP_BYTES) / WORD_BYTES; words > 0) sum += take_words(left, words);
    if (const size_t steps = left.data.size() / STEP_BYTES; steps > 0) {
        sum += sum_steps(left.data.data(), left.column / WORD_BYTES, steps, reading, left.target);
        left.advance(steps * STEP_BYTES);
    }
    if (const size_t words = left.data.size() / WORD_BYTES; words > 0) sum += take_words(left, words);
    if (!left.data.empty()) sum += take_bytes(left, left.data.size());
    return sum;
}

uint64_t sum_rows(const Copy& copy, SumSteps sum_steps, ReadAhead& reading) {
    uint64_t total = 0;
    for (size_t at = 0; at < copy.bytes;) {
        const uint64_t offset = copy.offset + at;
        const size_t column = offset % DIGEST_ROW_BYTES;
        const size_t taken = std::min(copy.bytes - at, DIGEST_ROW_BYTES - column);
        const Stretch stretch{{copy.source + at, taken}, column, after(copy.target, at)};
        const bool whole = column % STEP_BYTES == 0 && taken % STEP_BYTES == 0;
        const Wide sum =
            whole ? sum_steps(stretch.data.data(), column / WORD_BYTES, taken / STEP_BYTES, reading, stretch.target)
                  : sum_row(stretch, sum_steps, reading);
        total = reduced(static_cast<Wide>(reduced(sum)) * row_entry(offset / DIGEST_ROW_BYTES) + total);
        at += taken;
    }
    reading.keep_up(copy.bytes);
    return total;
}

}  // namespace

DigestSum operator+(const DigestSum& one, const DigestSum& other) {
    const uint64_t sum = one.sum + other.sum;
    return {sum < P ? sum : sum - P, one.bytes + other.bytes};
}

DigestSum digest_sum(std::span<const std::byte> stretch, uint64_t offset, DigestPath path) {
    if (offset > DIGEST_PAYLOAD_BYTES_MAX || stretch.size() > DIGEST_PAYLOAD_BYTES_MAX - offset) {
        bad_argument(
            format("%zu bytes at %lu must end at %lu or before", stretch.size(), offset, DIGEST_PAYLOAD_BYTES_MAX));
    }
    const Copy copy{stretch.data(), nullptr, stretch.size(), offset};
    uint64_t sum = 0;
    digest_copies({&copy, 1}, {&sum, 1}, Through::CACHE, path);
    return {sum, stretch.size()};
}

void digest_copies(std::span<const Copy> copies, std::span<uint64_t> sums, Through through, DigestPath path) {
    ReadAhead reading(copies, AHEAD_BYTES);
    for (size_t i = 0; i < copies.size(); ++i) {
        const Copy& copy = copies[i];
        // Stores of 4 KiB pages are 10 % faster if they do not wait for the translation of their target's next address.
        // Targets that are scattered gain nothing.
        const std::byte* const end = after(copy.target, copy.bytes);
        if (end != nullptr && i + 1 < copies.size() && copies[i + 1].target == end) __builtin_prefetch(end);
        // The steps of a row begin at multiples of 64 bytes of the payload.
        const bool aligned = (reinterpret_cast<uintptr_t>(copy.target) - copy.offset) % 32 == 0;
        const Keep keep = copy.target == nullptr                  ? Keep::NOT
                          : through == Through::MEMORY && aligned ? Keep::STREAMED
                                                                  : Keep::STORED;
        sums[i] = sum_rows(copy, chosen(keep, path), reading);
    }
}

namespace {

// The part of a digest that the name and the length give.
uint64_t share_of(const ShardName& name, uint64_t payload_bytes) {
    const uint16_t numbers[] = {name.group, name.shard};
    const Digest hash = sha256(
        std::array{std::as_bytes(text_of("kvserver digest 1")), std::span<const std::byte>(name.namespace_digest),
                   std::span<const std::byte>(name.key), std::as_bytes(std::span<const uint16_t>(numbers)),
                   std::as_bytes(std::span<const uint64_t>(&payload_bytes, 1))});
    uint64_t quarters[4];
    std::memcpy(quarters, hash.data(), sizeof quarters);
    // 2^64 is 8 modulo the prime.
    const Wide named = quarters[0] + static_cast<Wide>(quarters[1]) * 8 + static_cast<Wide>(quarters[2]) * 64 +
                       static_cast<Wide>(quarters[3]) * 512;
    return reduced(named);
}

}  // namespace

std::optional<uint64_t> payload_digest(const DigestSum& sum, const ShardName& name, uint64_t payload_bytes) {
    if (sum.bytes != payload_bytes) return std::nullopt;
    return digest_of(sum.sum, name, payload_bytes);
}

uint64_t digest_of(uint64_t sum, const ShardName& name, uint64_t payload_bytes) {
    return sum == NO_DIGEST ? sum : reduced(static_cast<Wide>(sum) + share_of(name, payload_bytes));
}

uint64_t sum_of(uint64_t digest, const ShardName& name, uint64_t payload_bytes) {
    return digest == NO_DIGEST ? digest : reduced(static_cast<Wide>(digest) + P - share_of(name, payload_bytes));
}

void prepare_digest(uint64_t payload_bytes) {
    columns();
    const uint64_t rows = (std::min(payload_bytes, DIGEST_PAYLOAD_BYTES_MAX) + DIGEST_ROW_BYTES - 1) / DIGEST_ROW_BYTES;
    for (uint64_t row = 0; row < rows; row += ROWS_OF_STRETCH) row_entry(row);
}

std::array<uint32_t, 2 * DIGEST_COLUMNS> digest_columns() {
    std::array<uint32_t, 2 * DIGEST_COLUMNS> limbs;
    for (size_t word = 0; word < DIGEST_COLUMNS; ++word) {
        limbs[word] = static_cast<uint32_t>(columns().whole[word] & LIMB_MASK);
        limbs[DIGEST_COLUMNS + word] = static_cast<uint32_t>(columns().whole[word] >> LIMB_BITS);
    }
    return limbs;
}

std::vector<uint64_t> digest_rows(uint64_t rows) {
    if (rows > ROWS_MAX) bad_argument(format("rows=%lu must be at most %zu", rows, ROWS_MAX));
    std::vector<uint64_t> entries(rows);
    for (size_t row = 0; row < rows; ++row) entries[row] = row_entry(row);
    return entries;
}

}  // namespace kv
