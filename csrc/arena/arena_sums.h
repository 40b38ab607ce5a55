// Checksums of the arena's bytes over a restart of the server.
//
// While a server lives, DRAM has no checksums, like the rest of a process's memory: each would cost another read of the
// bytes. After an orderly stop, when nobody writes any more, put_sums() reads every sealed slot once and folds the sum
// of its payload (XXH3) into the seal of its ledger entry. At the next start, before a brain reads the ledger,
// compare_sums() does the same and restores the plain seal of entries that match. The others stay SUMMED, which no
// brain takes for sealed (arena/ledger.h). That includes entries that were not compared because the process was killed.

#pragma once

#include <cstdint>

#include "arena/ledger.h"

namespace kv {

struct Summed {
    uint64_t slots = 0;
    uint64_t bytes = 0;    // payload bytes of these slots
    uint64_t damaged = 0;  // slots that differ, or cannot be read; not among the other two
};

// put_sums() withdraws entries of slots that it cannot read. For both: the arena is the first arena_bytes of the file.
// Ledger entries for places after it are left alone (marks have no bytes). threads: 1 to 64. bad_argument;
// std::system_error when the arena cannot be mapped.
Summed put_sums(Ledger& ledger, int arena, uint64_t arena_bytes, int threads);
Summed compare_sums(Ledger& ledger, int arena, uint64_t arena_bytes, int threads);

}  // namespace kv
