#include "arena/arena_sums.h"

#include <atomic>
#include <optional>
#include <span>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "base/prefault.h"
#include "base/shared_memory.h"
#include "base/sigbus.h"
#include "base/threads.h"

namespace kv {
namespace {

constexpr int THREADS_MAX = 64;

// Reading fills the page tables fault by fault, which takes longer than the sum.
void fault_in_slot(std::byte* slot, uint64_t slot_bytes) {
    try {
        fault_in(slot, slot_bytes);
    } catch (const std::system_error&) {  // reading it will report the problem
    }
}

// The sum; nullopt when the memory is gone: the file was cut short, or a page is broken.
std::optional<uint64_t> sum_of(std::span<const std::byte> payload) {
    struct Reading {
        std::span<const std::byte> payload;
        uint64_t sum;
    } reading{payload, 0};
    const auto read = [](void* argument) {
        auto& here = *static_cast<Reading*>(argument);
        here.sum = xxh3(here.payload);
    };
    if (run_guarded(read, &reading) != nullptr) return std::nullopt;
    return reading.sum;
}

// Entries with that seal whose slots are in the arena; the ledger also has places after it.
std::vector<LedgerRecord> entries_in_arena(Ledger& ledger, Ledger::Seal seal, uint64_t arena_bytes) {
    std::vector<LedgerRecord> records = ledger.entries(seal);
    std::erase_if(records, [&](const LedgerRecord& record) {
        return static_cast<uint64_t>(record.arena_offset) + uint64_t{record.slot_units} * SLOT_ALIGN > arena_bytes;
    });
    return records;
}

// Calls handle(arena_offset, sum) for each slot, on one of the threads; without a sum if the slot cannot be read.
// handle returns whether the slot is right.
template <typename Handle>
Summed read_slots(const std::vector<LedgerRecord>& records, const Mapping& arena, int threads, Handle handle) {
    std::atomic<size_t> next = 0;
    std::atomic<uint64_t> slots = 0, bytes = 0, damaged = 0;
    const auto read_some = [&] {
        for (size_t at = next++; at < records.size(); at = next++) {
            const LedgerRecord& record = records[at];
            std::byte* const slot = arena.data() + record.arena_offset;
            fault_in_slot(slot, uint64_t{record.slot_units} * SLOT_ALIGN);
            if (handle(record.arena_offset, sum_of({slot, record.payload_bytes}))) {
                ++slots;
                bytes += record.payload_bytes;
            } else {
                ++damaged;
            }
        }
    };
    Threads helpers;
    for (int i = 1; i < threads; ++i) helpers.start(format("kv-sum-%d", i), read_some);
    read_some();
    helpers.join();
    return {slots, bytes, damaged};
}

Mapping map_to_read(int arena, uint64_t arena_bytes, int threads) {
    check_range("threads", threads, 1, THREADS_MAX);
    install_sigbus_guard();
    return map_arena(arena, arena_bytes);
}

}  // namespace

Summed put_sums(Ledger& ledger, int arena, uint64_t arena_bytes, int threads) {
    const Mapping mapping = map_to_read(arena, arena_bytes, threads);
    const auto records = entries_in_arena(ledger, Ledger::Seal::PLAIN, arena_bytes);
    return read_slots(records, mapping, threads, [&](int64_t arena_offset, std::optional<uint64_t> sum) {
        if (sum)
            ledger.put_sum(arena_offset, *sum);
        else
            ledger.clear({&arena_offset, 1});
        return sum.has_value();
    });
}

Summed compare_sums(Ledger& ledger, int arena, uint64_t arena_bytes, int threads) {
    const Mapping mapping = map_to_read(arena, arena_bytes, threads);
    const auto records = entries_in_arena(ledger, Ledger::Seal::SUMMED, arena_bytes);
    return read_slots(records, mapping, threads, [&](int64_t arena_offset, std::optional<uint64_t> sum) {
        return sum && ledger.take_sum(arena_offset, *sum);
    });
}

}  // namespace kv
