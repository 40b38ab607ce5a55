// The simulated driver's inside: a library with the entry points of libcuda or (SIM_HIP) libamdhip64, for tests.
//
// Device memory is shared memory, a stream is a thread, an IPC handle names a descriptor of its owner. It is stricter
// than the real ones where that finds mistakes: a device address cannot be dereferenced on the host, host addresses
// and device addresses of one memory differ, pageable memory cannot be copied, what an operation touches is checked
// when it runs. calls.cpp exports the entry points of csrc/gpu/driver/symbols.h.

#pragma once

#include <cstddef>
#include <cstdint>
#include <shared_mutex>
#include <string>

#include "gpu/driver/symbols.h"
#include "gpu/kernels/piece.h"
#include "state.h"

namespace sim {

using kv::gpu::Address;
using kv::gpu::IpcHandle;

#ifdef SIM_HIP
constexpr bool HIP = true;
#else
constexpr bool HIP = false;
#endif

using kv::gpu::INVALID_CONTEXT;
using kv::gpu::INVALID_VALUE;
using kv::gpu::NOT_READY;
using kv::gpu::NOT_SUPPORTED;
using kv::gpu::OUT_OF_MEMORY;
using kv::gpu::SUCCESS;
constexpr int NOT_INITIALIZED = 3;
constexpr int NO_DEVICE = 100;
constexpr int INVALID_DEVICE = 101;
constexpr int INVALID_IMAGE = 200;
constexpr int ALREADY_MAPPED = 208;
constexpr int NO_BINARY = 209;
constexpr int INVALID_HANDLE = 400;
constexpr int NOT_FOUND = 500;
constexpr int ILLEGAL_ADDRESS = 700;
constexpr int ALREADY_REGISTERED = 712;
constexpr int NOT_REGISTERED = 713;
constexpr int LAUNCH_FAILED = 719;
constexpr int CAPTURE_UNSUPPORTED = 900;
constexpr int CAPTURE_INVALIDATED = 901;

enum class Symbol {
#define KV_NUMBER(field, type, cuda, hip, required) field,
    KV_DRIVER_SYMBOLS(KV_NUMBER)
#undef KV_NUMBER
        COUNT
};
static_assert(static_cast<unsigned>(Symbol::COUNT) <= COUNTERS);

// As this vendor calls it; null when it has no such call.
const char* name_of(Symbol symbol);

// ---------------------------------------------------------------- state.cpp

// Maps the state file once; an error code when KVSIM_STATE names none.
int attach();
bool attached();  // in this process, not in one that it was forked from
State& state();

class StateLock {
  public:
    StateLock();
    ~StateLock();
};

Process myself();
bool lives(const Process& process);
// By the devices' own numbers, not ordinals. Under StateLock.
uint64_t used_bytes(unsigned device);

// Ordinals number the devices of KVSIM_VISIBLE ("1,0"), or all.
int ordinals();
int device_of_ordinal(int ordinal);  // -1: no such ordinal
int ordinal_of_device(int device);   // -1: not visible here

// ---------------------------------------------------------------- faults.cpp

enum class Needs { NOTHING, DRIVER, DEVICE };  // initialised; with a device current in this thread

// The begin of every entry point: counts, then says with which code it fails at once. 0: it goes on.
int enter(Symbol symbol, Needs needs);

struct Verdict {
    int code = SUCCESS;
    bool corrupt = false;
};
// What the rules say of a call or operation; delays and hangs happen inside.
Verdict consult(const char* symbol);
int sticky();
void make_sticky(int code);

int exchange_capture_mode(int* mode);
void begin_capture();
int end_capture();

// The device that is current in this thread, by its own number; -1: none (CUDA).
int current_device();
int push_context(void* context);
int pop_context(void** context);
int retain_context(void** context, int ordinal);
int set_ordinal(int ordinal);
int get_ordinal(int* ordinal);

// ---------------------------------------------------------------- memory.cpp

enum class Kind { DEVICE, IMPORT, PINNED, REGISTERED };

struct Region {
    Kind kind;
    Address base;
    uint64_t bytes;
    std::byte* host;
    int device;  // of PINNED and REGISTERED: -1
    uint64_t allocation;
    int fd;
    unsigned opens;  // of an IMPORT
};

// Taken shared by who touches memory, alone by who maps or unmaps it.
std::shared_mutex& table_lock();
// All under table_lock. Null when those bytes are not within one region that `device` reaches (-1: any).
std::byte* at(Address address, uint64_t bytes, int device);
std::byte* pinned_at(const void* host, uint64_t bytes);
const Region* region_of(Address address);
Region* import_of(uint64_t allocation);
void add(const Region& region);
void remove(Address base);
Address tagged(const void* host);

int allocate(Address* memory, size_t bytes, bool exportable);
int release(Address memory);
int host_allocate(void** memory, size_t bytes);
int host_release(void* memory);
int host_register(void* memory, size_t bytes, unsigned flags);
int host_unregister(void* memory);
int host_device_pointer(Address* device, void* memory);
int address_range(Address* base, size_t* bytes, Address memory);
int pointer_attribute(void* value, int attribute, Address memory);

// ---------------------------------------------------------------- ipc.cpp

int ipc_get(IpcHandle* handle, Address memory);
int ipc_open(Address* memory, const IpcHandle& handle, unsigned flags);
int ipc_close(Address memory);

// ---------------------------------------------------------------- streams.cpp

int stream_create(void** stream, unsigned flags);
int stream_destroy(void* stream);
int stream_wait(void* stream, void* event);
int stream_query(void* stream);
int event_create(void** event);
int event_destroy(void* event);
int event_record(void* event, void* stream);
int event_query(void* event);

int copy_to_host(void* to, Address from, size_t bytes, void* stream);
int copy_to_device(Address to, const void* from, size_t bytes, void* stream);
int copy_batch(const Address* to, const Address* from, const size_t* bytes, size_t count, const void* attributes,
               const size_t* attribute_indices, size_t attribute_count, void* stream);

// ---------------------------------------------------------------- kernels.cpp

int module_load(void** module, const void* image);
int module_unload(void* module);
int module_function(void** function, void* module, const char* name);

enum class Kernel { GATHER, SCATTER, DIGEST };
struct Launch {
    Kernel kernel;
    Address pieces;
    unsigned count;
    unsigned crews;
    Address segment;  // of copies
    Address columns;  // of digests, as the others below
    Address rows;
    kv::gpu::DigestTotals totals;
};
// What the arguments of a launch say; false: not a function of ours.
bool read_launch(void* function, void** arguments, Launch& launch);
// Which of the bytes that a kernel writes are wrong: one that it copies, one that it reports; or it reports nothing.
struct Mistakes {
    bool copy = false;
    bool report = false;
    bool silent = false;
};
// Under table_lock. ILLEGAL_ADDRESS when it touches what it must not.
int run_kernel(const Launch& launch, int device, const Mistakes& mistakes);
int launch(void* function, unsigned blocks, unsigned threads, void* stream, void** arguments);

// What the simulated run-time compiler makes for an architecture.
std::string code_for(const std::string& arch, const std::string& source);

}  // namespace sim
