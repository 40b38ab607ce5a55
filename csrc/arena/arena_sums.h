// What the bytes of the arena were when a server stopped, so that the next one serves no others.
//
// While a server lives, DRAM has no checksums, like the rest of a process's memory: each would cost a read of what was
// just written. When it has stopped in order and nobody writes any more, put_sums() reads every sealed slot once and
// folds the sum of its payload (XXH3) into the seal of its ledger entry. compare_sums() does it again at the next
// start, before a brain reads the ledger, and gives right entries their plain seal back. The others stay summed, which
// no brain takes for sealed (arena/ledger.h): also those that nobody compared, because whoever did it was killed.

#pragma once

#include <cstdint>

#include "arena/ledger.h"

namespace kv {

struct Summed {
    uint64_t slots = 0;
    uint64_t bytes = 0;    // of their payloads
    uint64_t damaged = 0;  // slots that differ, or cannot be read; not among the other two
};

// put_sums() withdraws what it cannot read. Both: the arena is the first arena_bytes of the file; what the ledger says
// of places behind it is left alone (marks have no bytes). `threads` of 1 to 64 read. bad_argument; std::system_error
// when the arena cannot be mapped.
Summed put_sums(Ledger& ledger, int arena, uint64_t arena_bytes, int threads);
Summed compare_sums(Ledger& ledger, int arena, uint64_t arena_bytes, int threads);

}  // namespace kv
