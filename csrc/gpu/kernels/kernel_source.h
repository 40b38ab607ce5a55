// The kernels: pages of the KV pool gathered into a segment of staging or scattered from it. One kernel does either and
// sums the same bytes for the digest of a payload (base/digest.h), bit by bit as a CPU does it.
//
// One source for all: NVRTC and nvcc, HIPRTC, clang for either vendor without any header, and g++, where it is an
// ordinary loop for the simulated driver. A crew of 32 consecutive threads copies one piece; how many crews there are
// is an argument, so that no kernel asks for its grid, and nothing depends on the size of a wavefront.
//
// A piece is copied in the widest unit that divides both addresses and its length: 16, 8, 4, 2 or 1 bytes. Each lane
// has four loads in flight before its first store. 16-byte accesses tell the caches that nothing is used twice, so that
// the engine keeps its own there.
//
// On the host KV_RESOLVE(address, bytes, writes) may be defined beforehand: it turns a device address into one that
// can be used, once a piece and side.

#pragma once

#include "gpu/kernels/piece.h"

#if defined(__CUDACC__) || defined(__CUDA__)
#define KV_NVIDIA
#elif defined(__HIP__) || defined(__HIPCC_RTC__)
#define KV_AMD
#else
#define KV_HOST
#endif

#if defined(KV_HOST)
#define KV_KERNEL(threads, blocks) extern "C" inline
#define KV_FUNCTION inline
#elif defined(KV_AMD)
#define KV_KERNEL(threads, blocks) \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define KV_FUNCTION static inline __attribute__((device)) __attribute__((always_inline))
#elif defined(__clang__)
#define KV_KERNEL(threads, blocks) extern "C" __attribute__((global)) __attribute__((launch_bounds(threads, blocks)))
#define KV_FUNCTION static inline __attribute__((device)) __attribute__((always_inline))
#else
#define KV_KERNEL(threads, blocks) extern "C" __global__ __launch_bounds__(threads, blocks)
#define KV_FUNCTION static __device__ __forceinline__
#endif

#ifndef KV_RESOLVE
#define KV_RESOLVE(address, bytes, writes) (address)
#endif

namespace kv::gpu {

using Word64 = unsigned long long;

// Digests are numbers modulo the prime 2^61 - 1. This takes any and gives less than 2^61 + 8, so that several of its
// results can be added before the next. A CPU reduces the last one.
KV_FUNCTION Word64 folded(Word64 number) { return (number & ((1ull << 61) - 1)) + (number >> 61); }

// ---------------------------------------------------------------- what differs: who am I, and how bytes are touched

#ifdef KV_AMD
// An integer becomes a generic pointer otherwise, and its load a flat one.
#define KV_GLOBAL __attribute__((address_space(1)))
#else
#define KV_GLOBAL
#endif

#ifdef KV_HOST

#define KV_EACH_CREW(crew, crews, threads) for (unsigned crew = 0; crew < (crews); ++crew)
#define KV_EACH_LANE(lane) for (unsigned lane = 0; lane < CREW_LANES; ++lane)

struct Unit16 {
    Word64 low, high;
};

template <typename Unit>
KV_FUNCTION void read(Unit& unit, Word64 from) {
    __builtin_memcpy(&unit, reinterpret_cast<const void*>(from), sizeof unit);
}
template <typename Unit>
KV_FUNCTION void write(Word64 to, const Unit& unit) {
    __builtin_memcpy(reinterpret_cast<void*>(to), &unit, sizeof unit);
}
template <typename Unit>
KV_FUNCTION void look_up(Unit& unit, Word64 from) {
    read(unit, from);
}
KV_FUNCTION void split(const Unit16& unit, unsigned (&words)[4]) { __builtin_memcpy(words, &unit, sizeof words); }
KV_FUNCTION void add(Word64 to, Word64 number) {
    __atomic_fetch_add(reinterpret_cast<Word64*>(to), number, __ATOMIC_RELAXED);
}

// These two return what was there before. The first one comes after all that the block did before it waited.
KV_FUNCTION Word64 add_one(Word64 to) { return __atomic_fetch_add(reinterpret_cast<Word64*>(to), 1, __ATOMIC_RELAXED); }
KV_FUNCTION Word64 take(Word64 from) {
    return __atomic_exchange_n(reinterpret_cast<Word64*>(from), 0, __ATOMIC_RELAXED);
}

// One thread is all crews, and all lanes.
KV_FUNCTION void wait_for_block() {}
KV_FUNCTION void fence_after() {}
KV_FUNCTION void fence_for_host() {}
KV_FUNCTION Word64 of_all_lanes(Word64 share) { return share; }
KV_FUNCTION unsigned of_first_lane(unsigned number) { return number; }
KV_FUNCTION bool is_first_lane() { return true; }
KV_FUNCTION unsigned lane_index() { return 0; }
KV_FUNCTION unsigned of_lane(unsigned number, unsigned) { return number; }
constexpr unsigned CREW_READERS = 1;

#else

#define KV_EACH_CREW(crew, crews, threads) \
    if (const unsigned crew = (block_index() * (threads) + thread_index()) / CREW_LANES; crew < (crews))
#define KV_EACH_LANE(lane) if (const unsigned lane = thread_index() % CREW_LANES; lane < CREW_LANES)

template <typename Unit>
KV_FUNCTION void read(Unit& unit, Word64 from) {
    unit = *reinterpret_cast<const KV_GLOBAL Unit*>(from);
}
template <typename Unit>
KV_FUNCTION void write(Word64 to, const Unit& unit) {
    *reinterpret_cast<KV_GLOBAL Unit*>(to) = unit;
}

#endif

#ifdef KV_NVIDIA

KV_FUNCTION unsigned block_index() {
    unsigned index;
    asm("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}
KV_FUNCTION unsigned thread_index() {
    unsigned index;
    asm("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

struct Unit16 {
    unsigned a, b, c, d;
};

// volatile also keeps the loads of a pass before its stores.
KV_FUNCTION void read(Unit16& unit, Word64 from) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.a), "=r"(unit.b), "=r"(unit.c), "=r"(unit.d)
                 : "l"(from)
                 : "memory");
}
KV_FUNCTION void write(Word64 to, const Unit16& unit) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(unit.a), "r"(unit.b), "r"(unit.c), "r"(unit.d)
                 : "memory");
}
// Reads a table that nobody writes, and that shall stay in the cache.
KV_FUNCTION void look_up(Unit16& unit, Word64 from) {
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(unit.a), "=r"(unit.b), "=r"(unit.c), "=r"(unit.d)
        : "l"(from));
}
KV_FUNCTION void look_up(unsigned& word, Word64 from) { asm("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(from)); }
KV_FUNCTION void look_up(Word64& entry, Word64 from) {
    asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(entry) : "l"(from));
}
KV_FUNCTION void split(const Unit16& unit, unsigned (&words)[4]) {
    words[0] = unit.a, words[1] = unit.b, words[2] = unit.c, words[3] = unit.d;
}
KV_FUNCTION void add(Word64 to, Word64 number) {
    asm volatile("red.global.add.u64 [%0], %1;" : : "l"(to), "l"(number) : "memory");
}
KV_FUNCTION Word64 add_one(Word64 to) {
    Word64 before;
    asm volatile("atom.release.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(to) : "memory");
    return before;
}
KV_FUNCTION Word64 take(Word64 from) {
    Word64 before;
    asm volatile("atom.global.exch.b64 %0, [%1], 0;" : "=l"(before) : "l"(from) : "memory");
    return before;
}
KV_FUNCTION void wait_for_block() { asm volatile("barrier.sync 0;" : : : "memory"); }
KV_FUNCTION void fence_after() { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }
KV_FUNCTION void fence_for_host() { asm volatile("membar.sys;" : : : "memory"); }
KV_FUNCTION unsigned of_first_lane(unsigned number) {
    asm volatile("shfl.sync.idx.b32 %0, %0, 0, 0x1f, 0xffffffff;" : "+r"(number) : : "memory");
    asm volatile("bar.warp.sync 0xffffffff;" : : : "memory");  // it orders accesses of the lanes, a shuffle need not
    return number;
}
KV_FUNCTION unsigned of_lane(unsigned number, unsigned lane) {
    asm volatile("shfl.sync.idx.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(number) : "r"(lane));
    return number;
}
template <unsigned APART>
KV_FUNCTION unsigned of_lane_apart(unsigned number) {
    asm volatile("shfl.sync.bfly.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(number) : "n"(APART));
    return number;
}

#endif

#ifdef KV_AMD

KV_FUNCTION unsigned block_index() { return __builtin_amdgcn_workgroup_id_x(); }
KV_FUNCTION unsigned thread_index() { return __builtin_amdgcn_workitem_id_x(); }

typedef unsigned Unit16 __attribute__((ext_vector_type(4)));

KV_FUNCTION void read(Unit16& unit, Word64 from) {
    unit = __builtin_nontemporal_load(reinterpret_cast<const KV_GLOBAL Unit16*>(from));
}
KV_FUNCTION void write(Word64 to, const Unit16& unit) {
    __builtin_nontemporal_store(unit, reinterpret_cast<KV_GLOBAL Unit16*>(to));
}
// Reads a table, which shall stay in the cache.
template <typename Unit>
KV_FUNCTION void look_up(Unit& unit, Word64 from) {
    unit = *reinterpret_cast<const KV_GLOBAL Unit*>(from);
}
KV_FUNCTION void split(const Unit16& unit, unsigned (&words)[4]) {
    words[0] = unit.x, words[1] = unit.y, words[2] = unit.z, words[3] = unit.w;
}
KV_FUNCTION void add(Word64 to, Word64 number) {
    __hip_atomic_fetch_add(reinterpret_cast<KV_GLOBAL Word64*>(to), number, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
KV_FUNCTION Word64 add_one(Word64 to) {
    return __hip_atomic_fetch_add(reinterpret_cast<KV_GLOBAL Word64*>(to), 1ull, __ATOMIC_RELAXED,
                                  __HIP_MEMORY_SCOPE_AGENT);
}
KV_FUNCTION Word64 take(Word64 from) {
    return __hip_atomic_exchange(reinterpret_cast<KV_GLOBAL Word64*>(from), 0ull, __ATOMIC_RELAXED,
                                 __HIP_MEMORY_SCOPE_AGENT);
}
// Each wavefront waits for its own accesses: the barrier does not.
KV_FUNCTION void wait_for_block() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    __builtin_amdgcn_s_barrier();
}
KV_FUNCTION void fence_after() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
KV_FUNCTION void fence_for_host() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, ""); }
KV_FUNCTION unsigned of_first_lane(unsigned number) { return __builtin_amdgcn_ds_swizzle(number, 0); }
KV_FUNCTION unsigned of_lane(unsigned number, unsigned lane) {
    return __builtin_amdgcn_ds_bpermute((thread_index() / CREW_LANES * CREW_LANES + lane) * sizeof number, number);
}
// Within 32 lanes, as a crew is half of a wavefront: the upper five bits of the pattern are XORed to a lane's number.
template <unsigned APART>
KV_FUNCTION unsigned of_lane_apart(unsigned number) {
    return __builtin_amdgcn_ds_swizzle(number, APART << 10 | 0x1f);
}

#endif

#ifndef KV_HOST

KV_FUNCTION unsigned lane_index() { return thread_index() % CREW_LANES; }
KV_FUNCTION bool is_first_lane() { return lane_index() == 0; }
constexpr unsigned CREW_READERS = CREW_LANES;

template <unsigned APART>
KV_FUNCTION Word64 with_lane(Word64 share) {
    const Word64 other =
        (Word64)of_lane_apart<APART>((unsigned)(share >> 32)) << 32 | of_lane_apart<APART>((unsigned)share);
    return folded(share + other);
}
// The sum of a crew's shares, in each of its lanes.
KV_FUNCTION Word64 of_all_lanes(Word64 share) {
    return with_lane<1>(with_lane<2>(with_lane<4>(with_lane<8>(with_lane<16>(share)))));
}

#endif

// ---------------------------------------------------------------- what is the same

template <typename Unit>
KV_FUNCTION void copy_units(Word64 to, Word64 from, unsigned bytes, unsigned lane) {
    constexpr unsigned STEP = CREW_LANES * sizeof(Unit);
    unsigned at = lane * sizeof(Unit);
    for (; at + 3 * STEP < bytes; at += 4 * STEP) {
        Unit first, second, third, fourth;
        read(first, from + at);
        read(second, from + at + STEP);
        read(third, from + at + 2 * STEP);
        read(fourth, from + at + 3 * STEP);
        write(to + at, first);
        write(to + at + STEP, second);
        write(to + at + 2 * STEP, third);
        write(to + at + 3 * STEP, fourth);
    }
    for (; at < bytes; at += STEP) {
        Unit unit;
        read(unit, from + at);
        write(to + at, unit);
    }
}

KV_FUNCTION void copy_share(Word64 to, Word64 from, unsigned bytes, unsigned lane) {
    const Word64 all = to | from | bytes;
    if (all % 16 == 0) {
        copy_units<Unit16>(to, from, bytes, lane);
    } else if (all % 8 == 0) {
        copy_units<Word64>(to, from, bytes, lane);
    } else if (all % 4 == 0) {
        copy_units<unsigned>(to, from, bytes, lane);
    } else if (all % 2 == 0) {
        copy_units<unsigned short>(to, from, bytes, lane);
    } else {
        copy_units<unsigned char>(to, from, bytes, lane);
    }
}

// The list may lie in host memory: the next piece is fetched before this one is copied.
template <bool GATHERS>
KV_FUNCTION void copy_pieces(const Piece* pieces, unsigned count, Word64 segment, unsigned crews, unsigned crew) {
    if (crew >= count) return;
    Piece next = pieces[crew];
    for (unsigned index = crew; index < count; index += crews) {
        const Piece piece = next;
        if (index + crews < count) next = pieces[index + crews];
        const Word64 pool = (Word64)(KV_RESOLVE(piece.pool, piece.bytes, !GATHERS));
        const Word64 staging = (Word64)(KV_RESOLVE(segment + piece.staging, piece.bytes, GATHERS));
        KV_EACH_LANE(lane) copy_share(GATHERS ? staging : pool, GATHERS ? pool : staging, piece.bytes, lane);
    }
}

KV_KERNEL(THREADS, 1) void kv_gather(const Piece* pieces, unsigned count, Word64 segment, unsigned crews) {
    KV_EACH_CREW(crew, crews, THREADS) copy_pieces<true>(pieces, count, segment, crews, crew);
}

KV_KERNEL(THREADS, 1) void kv_scatter(const Piece* pieces, unsigned count, Word64 segment, unsigned crews) {
    KV_EACH_CREW(crew, crews, THREADS) copy_pieces<false>(pieces, count, segment, crews, crew);
}

// ---------------------------------------------------------------- digest

constexpr unsigned ROW_BYTES = 4096;

KV_FUNCTION Word64 product(unsigned one, unsigned other) { return (Word64)one * other; }

// number * entry, of less than 2^62 and 2^60, by halves of 32 bits: 2^64 is 8 modulo the prime.
KV_FUNCTION Word64 times(Word64 number, Word64 entry) {
    const unsigned low = (unsigned)number, high = (unsigned)(number >> 32);
    const unsigned entry_low = (unsigned)entry, entry_high = (unsigned)(entry >> 32);
    const Word64 middle = product(low, entry_high) + product(high, entry_low);
    return folded(folded(product(low, entry_low)) + (middle >> 29) + ((middle & 0x1fffffff) << 32) +
                  8 * product(high, entry_high));
}

// The sum of up to 128 numbers of 64 bits, as base/digest.cpp has it: modulo 2^64, and of the numbers' upper seven
// bits.
struct Sum {
    Word64 low;
    unsigned tops;
};
constexpr unsigned TOP_SHIFT = 57;

KV_FUNCTION void grow(Sum& sum, Word64 number) {
    sum.low += number;
    sum.tops += (unsigned)(number >> TOP_SHIFT);
}

// Modulo the prime.
KV_FUNCTION Word64 value(const Sum& sum) {
    const Word64 rest = sum.low - ((Word64)sum.tops << TOP_SHIFT);
    return folded(folded(rest) + (sum.tops >> 4) + ((Word64)(sum.tops & 15) << TOP_SHIFT));
}

// The tables B and A, and what a lane has summed: rows that it has left, and its words of the row that it is in, times
// the lower and times the upper limbs of their columns.
struct Lane {
    Word64 columns;
    Word64 rows;
    Word64 sum;
    Sum lower;
    Sum upper;
};

// The entry of a row is asked for before the row's bytes: it is there when they are summed.
KV_FUNCTION Word64 entry_of(const Lane& lane, unsigned row) {
    Word64 entry;
    look_up(entry, (Word64)(KV_RESOLVE(lane.rows + (Word64)row * sizeof entry, sizeof entry, false)));
    return entry;
}

KV_FUNCTION void end_row(Lane& lane, Word64 entry) {
    const Word64 upper = value(lane.upper);
    const Word64 of_row = folded(value(lane.lower) + (upper >> 31) + ((upper & 0x7fffffff) << 30));
    lane.sum = folded(lane.sum + times(of_row, entry));
    lane.lower = lane.upper = {0, 0};
}

// The place of the lower limb of a word's column; the upper limb lies a row behind it. Lanes beside each other read
// entries beside each other, because these loads, not the products, are what takes the time.
KV_FUNCTION Word64 column_at(const Lane& lane, unsigned offset) { return lane.columns + offset % ROW_BYTES; }

KV_FUNCTION void weigh(Lane& lane, const Unit16& unit, Word64 column) {
    Unit16 lowers, uppers;
    look_up(lowers, column);
    look_up(uppers, column + ROW_BYTES);
    unsigned words[4], lower_limbs[4], upper_limbs[4];
    split(unit, words);
    split(lowers, lower_limbs);
    split(uppers, upper_limbs);
    Word64 lower = 0, upper = 0;  // four products of 32 and 30 bits just fit
    for (unsigned word = 0; word < 4; ++word) {
        lower += product(words[word], lower_limbs[word]);
        upper += product(words[word], upper_limbs[word]);
    }
    grow(lane.lower, lower);
    grow(lane.upper, upper);
}

KV_FUNCTION void weigh(Lane& lane, unsigned word, Word64 column) {
    unsigned lower, upper;
    look_up(lower, column / 4 * 4);
    look_up(upper, column / 4 * 4 + ROW_BYTES);
    grow(lane.lower, product(word, lower));
    grow(lane.upper, product(word, upper));
}

KV_FUNCTION void weigh(Lane& lane, unsigned char byte, Word64 column) {
    weigh(lane, (unsigned)byte << 8 * (unsigned)(column % 4), column);
}

// to: where the units are copied as well, or 0.
template <typename Unit>
KV_FUNCTION void sum_units(Lane& lane, Word64 to, Word64 from, unsigned offset, unsigned bytes, unsigned number) {
    constexpr unsigned STEP = CREW_LANES * sizeof(Unit);
    static_assert(ROW_BYTES / STEP <= 1 << (64 - TOP_SHIFT));
    unsigned at = number * sizeof(Unit);
    while (at < bytes) {
        const unsigned left = ROW_BYTES - (offset + at) % ROW_BYTES;
        const unsigned end = left < bytes - at ? at + left : bytes;
        const Word64 entry = entry_of(lane, (offset + at) / ROW_BYTES);
        if constexpr (sizeof(Unit) == 16) {
            for (; at + 3 * STEP < end; at += 4 * STEP) {
                Unit first, second, third, fourth;
                read(first, from + at);
                read(second, from + at + STEP);
                read(third, from + at + 2 * STEP);
                read(fourth, from + at + 3 * STEP);
                if (to != 0) {
                    write(to + at, first);
                    write(to + at + STEP, second);
                    write(to + at + 2 * STEP, third);
                    write(to + at + 3 * STEP, fourth);
                }
                const Word64 column = column_at(lane, offset + at);
                weigh(lane, first, column);
                weigh(lane, second, column + STEP);
                weigh(lane, third, column + 2 * STEP);
                weigh(lane, fourth, column + 3 * STEP);
            }
        }
        for (; at < end; at += STEP) {
            Unit unit;
            read(unit, from + at);
            if (to != 0) write(to + at, unit);
            weigh(lane, unit, column_at(lane, offset + at));
        }
        end_row(lane, entry);
    }
}

// Widths as for copies, but for those of 8 and 2 bytes. Only the widest has several loads in flight: pages whose bytes
// are no multiple of 16 are rare, and code takes time to compile.
KV_FUNCTION void sum_share(Lane& lane, Word64 to, Word64 from, unsigned offset, unsigned bytes, unsigned number) {
    const Word64 all = to | from | offset | bytes;
    if (all % 16 == 0) {
        sum_units<Unit16>(lane, to, from, offset, bytes, number);
    } else if (all % 4 == 0) {
        sum_units<unsigned>(lane, to, from, offset, bytes, number);
    } else {
        sum_units<unsigned char>(lane, to, from, offset, bytes, number);
    }
}

KV_FUNCTION Word64 shares_at(const DigestTotals& totals, unsigned sum) {
    const Word64 at = totals.shares + (Word64)sum * sizeof(DigestShares);
    return (Word64)(KV_RESOLVE(at, sizeof(DigestShares), true));
}

KV_FUNCTION void add_shares(const DigestTotals& totals, unsigned index, Word64 share, unsigned bytes) {
    const Word64 sum = of_all_lanes(share);
    const Word64 place = shares_at(totals, index);
    for (unsigned part = lane_index(); part < 3; part += CREW_READERS) {  // in one access
        const Word64 low = sum & ((1ull << DIGEST_LOW_BITS) - 1), high = sum >> DIGEST_LOW_BITS;
        add(place + 8 * part, part == 0 ? low : part == 1 ? high : bytes);
    }
}

// A crew's part of the list, which may lie in host memory: the lanes read five pieces at once, a word each, and five
// more ahead.
struct Part {
    const DigestPiece* pieces;
    unsigned end;
    unsigned word;
    unsigned next;
};

#ifdef KV_HOST

KV_FUNCTION Part part_of(const DigestPiece* pieces, unsigned, unsigned end) { return {pieces, end, 0, 0}; }
KV_FUNCTION DigestPiece piece_at(const Part& part, unsigned index, unsigned) { return part.pieces[index]; }

#else

constexpr unsigned PIECE_WORDS = sizeof(DigestPiece) / sizeof(unsigned);
constexpr unsigned READ_AT_ONCE = CREW_LANES / PIECE_WORDS;

// This lane's word of the pieces from `index` on.
KV_FUNCTION unsigned word_from(const Part& part, unsigned index) {
    unsigned word = 0;
    if (index + lane_index() / PIECE_WORDS < part.end) {
        read(word, (Word64)(part.pieces + index) + lane_index() * sizeof word);
    }
    return word;
}
KV_FUNCTION Part part_of(const DigestPiece* pieces, unsigned begin, unsigned end) {
    Part part = {pieces, end, 0, 0};
    part.next = word_from(part, begin);
    return part;
}
// number: of the part's pieces before this one, all of which were asked for.
KV_FUNCTION DigestPiece piece_at(Part& part, unsigned index, unsigned number) {
    const unsigned first = number % READ_AT_ONCE * PIECE_WORDS;
    if (first == 0) {
        part.word = part.next;
        part.next = word_from(part, index + READ_AT_ONCE);
    }
    const auto word = [&](unsigned place) { return of_lane(part.word, first + place); };
    const unsigned bytes_and_sum = word(5);
    return {(Word64)word(1) << 32 | word(0), (Word64)word(3) << 32 | word(2), word(4), (unsigned short)bytes_and_sum,
            (unsigned short)(bytes_and_sum >> 16)};
}

#endif

// A crew takes neighbours in the list, which mostly belong to one sum: that is touched once then.
KV_FUNCTION void sum_pieces(const DigestPiece* pieces, unsigned count, Lane lane, const DigestTotals& totals,
                            unsigned crews, unsigned crew) {
    const unsigned more = count % crews;  // crews have a piece more than the others
    const unsigned begin = count / crews * crew + (crew < more ? crew : more);
    const unsigned end = begin + count / crews + (crew < more);
    Part part = part_of(pieces, begin, end);
    unsigned bytes = 0, sum = 0;
    for (unsigned index = begin;; ++index) {
        DigestPiece piece = {};
        if (index < end) piece = piece_at(part, index, index - begin);
        if (bytes != 0 && (index == end || piece.sum != sum)) {
            add_shares(totals, sum, lane.sum, bytes);
            lane.sum = bytes = 0;
        }
        if (index == end) return;
        sum = piece.sum;
        const Word64 from = (Word64)(KV_RESOLVE(piece.from, piece.bytes, false));
        const Word64 to = piece.to == 0 ? 0 : (Word64)(KV_RESOLVE(piece.to, piece.bytes, true));
        KV_EACH_LANE(number) sum_share(lane, to, from, piece.offset, piece.bytes, number);
        bytes += piece.bytes;
    }
}

// Whether all other blocks have added their shares: the last crew of each adds to the counter, after its block has.
KV_FUNCTION bool ends_last(const DigestTotals& totals, unsigned blocks) {
    unsigned last = 0;
    if (is_first_lane()) {
        const Word64 counter = (Word64)(KV_RESOLVE(totals.counter, sizeof(Word64), true));
        last = add_one(counter) == blocks - 1;
        if (last) take(counter);
    }
    if (of_first_lane(last) == 0) return false;
    fence_after();
    return true;
}

// Shares are read and zeroed by one atomic access, which no cache of a multiprocessor answers.
KV_FUNCTION void report(const DigestTotals& totals, unsigned sum) {
    const Word64 from = shares_at(totals, sum);
    const Word64 at = totals.reports + (Word64)sum * sizeof(DigestReport);
    const Word64 to = (Word64)(KV_RESOLVE(at, sizeof(DigestReport), true));
    const Word64 low = take(from), high = take(from + 8), bytes = take(from + 16);
    write(to, low);
    write(to + 8, high);
    write(to + 16, bytes);
    write(to + 24, (Word64)totals.launch);
}

KV_FUNCTION void report_all(const DigestTotals& totals) {
    KV_EACH_LANE(lane) {
        for (unsigned sum = lane; sum < totals.sums; sum += CREW_LANES) report(totals, sum);
    }
    fence_for_host();
}

// columns, rows: the tables B and A, as base/digest.h gives them. The block that ends last reports: a copy would wait
// behind others for the link.
KV_KERNEL(DIGEST_THREADS, DIGEST_BLOCKS_FIT)
void kv_digest(const DigestPiece* pieces, unsigned count, Word64 columns, Word64 rows, DigestTotals totals,
               unsigned crews) {
    const Lane lane = {columns, rows, 0, {0, 0}, {0, 0}};
    KV_EACH_CREW(crew, crews, DIGEST_THREADS) {
        sum_pieces(pieces, count, lane, totals, crews, crew);
        wait_for_block();
        constexpr unsigned OF_A_BLOCK = DIGEST_THREADS / CREW_LANES;
        const bool counts = crew % OF_A_BLOCK == OF_A_BLOCK - 1;  // the last one, as a host runs them in turn
        if (counts && ends_last(totals, crews / OF_A_BLOCK)) report_all(totals);
    }
}

}  // namespace kv::gpu
