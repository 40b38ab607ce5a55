// The two kernels: pages of the KV pool gathered into a segment of staging, and scattered from it.
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
#define KV_KERNEL extern "C" inline
#define KV_FUNCTION inline
#elif defined(KV_AMD)
#define KV_KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1024, 1024)))
#define KV_FUNCTION static inline __attribute__((device)) __attribute__((always_inline))
#elif defined(__clang__)
#define KV_KERNEL extern "C" __attribute__((global)) __attribute__((launch_bounds(1024)))
#define KV_FUNCTION static inline __attribute__((device)) __attribute__((always_inline))
#else
#define KV_KERNEL extern "C" __global__ __launch_bounds__(1024)
#define KV_FUNCTION static __device__ __forceinline__
#endif

#ifndef KV_RESOLVE
#define KV_RESOLVE(address, bytes, writes) (address)
#endif

namespace kv::gpu {

using Word64 = unsigned long long;

// ---------------------------------------------------------------- what differs: who am I, and how bytes are touched

#ifdef KV_AMD
// An integer becomes a generic pointer otherwise, and its load a flat one.
#define KV_GLOBAL __attribute__((address_space(1)))
#else
#define KV_GLOBAL
#endif

#ifdef KV_HOST

#define KV_EACH_CREW(crew, crews) for (unsigned crew = 0; crew < (crews); ++crew)
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

#else

#define KV_EACH_CREW(crew, crews) \
    if (const unsigned crew = (block_index() * THREADS + thread_index()) / CREW_LANES; crew < (crews))
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

KV_KERNEL void kv_gather(const Piece* pieces, unsigned count, Word64 segment, unsigned crews) {
    KV_EACH_CREW(crew, crews) copy_pieces<true>(pieces, count, segment, crews, crew);
}

KV_KERNEL void kv_scatter(const Piece* pieces, unsigned count, Word64 segment, unsigned crews) {
    KV_EACH_CREW(crew, crews) copy_pieces<false>(pieces, count, segment, crews, crew);
}

}  // namespace kv::gpu
