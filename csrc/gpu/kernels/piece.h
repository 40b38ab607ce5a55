// A piece: what one crew of threads copies at a time between a page in the KV pool and a segment of staging, sums for
// the digest of a payload, or both.
//
// Included by kernels as well, which are compiled without any header: there is no #include here.

#pragma once

namespace kv::gpu {

// 16 bytes, the same on host and device.
struct Piece {
    unsigned long long pool;  // device address of the page's bytes
    unsigned staging;         // offset from the segment's begin
    unsigned bytes;
};

// 24 bytes. It is read once for both, its copy and its sum.
struct DigestPiece {
    unsigned long long from;  // device address
    unsigned long long to;    // where it is copied; 0: it is not
    unsigned offset;          // in its payload
    unsigned short bytes;
    unsigned short sum;  // which of the sums it is added to
};

// What is added up of some pieces; kernels.h makes a DigestSum of it. 2^31 * high + low is the sum, so that two
// ordinary additions of 64 bits count 2^33 shares before one overflows.
struct DigestShares {
    unsigned long long low;
    unsigned long long high;
    unsigned long long bytes;
};

// What the host reads. The number tells it which launch wrote this.
struct DigestReport {
    DigestShares shares;
    unsigned long long launch;
};

// Where a launch adds up its sums, and where it reports them. Addresses are the device's.
struct DigestTotals {
    unsigned long long shares;   // DigestShares of each sum, in device memory: zeros before and afterwards
    unsigned long long counter;  // 8 bytes likewise: the crews that have ended
    unsigned long long reports;  // DigestReport of each sum, in host memory
    unsigned long long launch;   // another number than in the reports that lie there
    unsigned sums;
};

constexpr unsigned DIGEST_LOW_BITS = 31;
constexpr unsigned PIECE_BYTES_MAX = 8192;
constexpr unsigned PIECES_MAX = 16384;  // of one segment
constexpr unsigned CREW_LANES = 32;     // threads of a crew: an NVIDIA warp, half of an AMD wavefront
constexpr unsigned THREADS = 1024;      // of a block that copies

// Blocks that sum are small and few: beside an engine a block begins when its registers are free, and keeps them until
// it ends. Four would take all of a multiprocessor's.
constexpr unsigned DIGEST_THREADS = 256;
constexpr unsigned DIGEST_BLOCKS_FIT = 4;  // on a multiprocessor: so a thread has 64 registers
constexpr unsigned DIGEST_BLOCKS = 2;      // for each multiprocessor, at most

}  // namespace kv::gpu
