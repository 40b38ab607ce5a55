// A piece: what one crew of threads copies at a time between a page in the KV pool and a segment of staging.
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

constexpr unsigned PIECE_BYTES_MAX = 8192;
constexpr unsigned PIECES_MAX = 16384;  // of one segment
constexpr unsigned CREW_LANES = 32;     // threads of a crew: an NVIDIA warp, half of an AMD wavefront
constexpr unsigned THREADS = 1024;      // of a block

}  // namespace kv::gpu
