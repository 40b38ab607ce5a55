// What all processes that use one simulated machine share: a file, mapped by each, named by KVSIM_STATE.
//
// tests/device/simulated.py makes the file and mirrors these structs byte for byte. Rules and counters are atomics and
// need no lock; the allocation table is changed under flock of the file, which the kernel lets go of when its holder
// dies.

#pragma once

#include <atomic>
#include <cstdint>

namespace sim {

constexpr uint64_t MAGIC = 0x31304d49'53564b00;  // "\0KVSIM01"
constexpr unsigned DEVICES = 4;
constexpr unsigned ALLOCATIONS = 512;
constexpr unsigned IMPORTERS = 16;
constexpr unsigned RULES = 32;
constexpr unsigned COUNTERS = 80;
constexpr unsigned NAME_BYTES = 40;

struct Header {
    uint64_t magic;
    uint32_t devices;
    int32_t driver_version;
    std::atomic<uint64_t> copy_bytes_per_s;    // of each copy; 0: as fast as it goes
    std::atomic<uint64_t> operation_delay_us;  // before each operation of a stream
    uint64_t next_allocation;
    uint32_t compiler_version;  // of the run-time compiler: the part before the point
    uint32_t reserved[5];
};
static_assert(sizeof(Header) == 64);

struct Device {
    unsigned char uuid[16];
    char pci[16];
    char name[32];
    char arch[16];
    uint64_t total_bytes;
    uint32_t multiprocessors;
    uint32_t capability;  // 90: 9.0
};
static_assert(sizeof(Device) == 96);

// A process, told from a later one of the same number.
struct Process {
    uint32_t pid;  // 0: nobody
    uint32_t reserved;
    uint64_t started;  // field 22 of /proc/PID/stat
};

// Memory of a device. It is in use for as long as its owner or an importer lives and has not given it back.
struct Allocation {
    uint64_t id;  // 0: this entry was never used
    uint64_t bytes;
    uint32_t device;
    uint32_t exportable;
    Process owner;
    Process importers[IMPORTERS];
};
static_assert(sizeof(Allocation) == 296);

enum class Action : uint32_t {
    CODE = 1,    // the call returns `code`
    STICKY = 2,  // and so does every later call of the process
    HANG = 3,    // until the rule is removed
    DELAY = 4,   // by `delay_us`
    CORRUPT = 5  // the copy flips one byte, the kernel one of what it writes
};

// What shall happen at a call of that name, or at "run:copy", "run:kernel" when a stream comes to such an operation.
struct Rule {
    char symbol[NAME_BYTES];
    uint32_t pid;  // 0: of any process
    std::atomic<uint32_t> active;
    std::atomic<int32_t> skip;   // so many calls pass untouched
    std::atomic<int32_t> times;  // then so many are met; very large: all
    Action action;
    int32_t code;
    uint64_t delay_us;
    std::atomic<uint32_t> met;
    uint32_t reserved;
};
static_assert(sizeof(Rule) == 80);

struct Counter {
    char symbol[NAME_BYTES];
    std::atomic<uint64_t> calls;
};
static_assert(sizeof(Counter) == 48);

struct State {
    Header header;
    Device devices[DEVICES];
    Allocation allocations[ALLOCATIONS];
    Rule rules[RULES];
    Counter counters[COUNTERS];
};

}  // namespace sim
