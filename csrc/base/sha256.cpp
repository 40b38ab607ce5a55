#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kv {
namespace {

constexpr size_t BLOCK_BYTES = 64;
constexpr size_t LENGTH_BYTES = 8;  // at the end of the last block: bits of the message, big-endian

using State = std::array<uint32_t, 8>;
using Compress = void (*)(State& state, const std::byte* blocks, size_t count);

constexpr State START = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(uint32_t number) {
    return std::endian::native == std::endian::little ? __builtin_bswap32(number) : number;
}

void compress_portable(State& state, const std::byte* blocks, size_t count) {
    for (; count > 0; --count, blocks += BLOCK_BYTES) {
        uint32_t w[64];
        std::memcpy(w, blocks, BLOCK_BYTES);
        for (int t = 0; t < 16; ++t) w[t] = big_endian(w[t]);
        for (int t = 16; t < 64; ++t) {
            const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
            const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        auto [a, b, c, d, e, f, g, h] = state;
        for (int t = 0; t < 64; ++t) {
            const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
            const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
            const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + K[t] + w[t];
            const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        const State grown = {a, b, c, d, e, f, g, h};
        for (size_t i = 0; i < state.size(); ++i) state[i] += grown[i];
    }
}

#if defined(__x86_64__)

// SHA-NI keeps the state as (a, b, e, f) and (c, d, g, h), and takes four words of the message at a time.
__attribute__((target("sha,sse4.1"))) void compress_x86(State& state, const std::byte* blocks, size_t count) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(&state[0])), 0xb1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(&state[4])), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (; count > 0; --count, blocks += BLOCK_BYTES) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; ++i) {
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks) + i), swap);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            const __m128i sum = _mm_add_epi32(w[i % 4], _mm_load_si128(reinterpret_cast<const __m128i*>(K) + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (i < 12) {  // words 16 to 63, each of four before it
                const __m128i older = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
                const __m128i part = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), older);
                w[i % 4] = _mm_sha256msg2_epu32(part, w[(i + 3) % 4]);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[0]), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[4]), _mm_alignr_epi8(dchg, feba, 8));
}

Compress best() {
    return __builtin_cpu_supports("sha") && __builtin_cpu_supports("sse4.1") ? compress_x86 : compress_portable;
}

#else

Compress best() { return compress_portable; }

#endif

// The state after all whole blocks, and the bytes of the next one.
class Hash {
  public:
    explicit Hash(Compress compress) : compress_(compress) {}

    void add(std::span<const std::byte> part) {
        total_bytes_ += part.size();
        if (held_bytes_ > 0) {
            const size_t taken = std::min(part.size(), BLOCK_BYTES - held_bytes_);
            if (taken > 0) std::memcpy(held_ + held_bytes_, part.data(), taken);
            held_bytes_ += taken;
            part = part.subspan(taken);
            if (held_bytes_ < BLOCK_BYTES) return;
            compress_(state_, held_, 1);
            held_bytes_ = 0;
        }
        const size_t blocks = part.size() / BLOCK_BYTES;
        compress_(state_, part.data(), blocks);
        part = part.subspan(blocks * BLOCK_BYTES);
        if (!part.empty()) std::memcpy(held_, part.data(), part.size());
        held_bytes_ = part.size();
    }

    Digest end() {
        const uint64_t bits = total_bytes_ * 8;
        held_[held_bytes_++] = std::byte{0x80};
        if (held_bytes_ > BLOCK_BYTES - LENGTH_BYTES) {
            std::fill(held_ + held_bytes_, held_ + BLOCK_BYTES, std::byte{0});
            compress_(state_, held_, 1);
            held_bytes_ = 0;
        }
        std::fill(held_ + held_bytes_, held_ + BLOCK_BYTES, std::byte{0});
        for (size_t i = 0; i < LENGTH_BYTES; ++i) held_[BLOCK_BYTES - 1 - i] = static_cast<std::byte>(bits >> 8 * i);
        compress_(state_, held_, 1);
        Digest digest;
        for (size_t i = 0; i < state_.size(); ++i) {
            const uint32_t word = big_endian(state_[i]);
            std::memcpy(digest.data() + 4 * i, &word, sizeof word);
        }
        return digest;
    }

  private:
    Compress compress_;
    State state_ = START;
    uint64_t total_bytes_ = 0;
    std::byte held_[BLOCK_BYTES];
    size_t held_bytes_ = 0;
};

}  // namespace

Digest sha256(std::span<const std::span<const std::byte>> parts, Sha256Path path) {
    static const Compress chosen = best();
    Hash hash(path == Sha256Path::BEST ? chosen : compress_portable);
    for (const auto& part : parts) hash.add(part);
    return hash.end();
}

}  // namespace kv
