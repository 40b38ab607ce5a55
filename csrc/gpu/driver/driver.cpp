#include "gpu/driver/driver.h"

#include <algorithm>
#include <cctype>

#include "base/check.h"
#include "gpu/driver/facts.h"

namespace kv::gpu {
namespace {

// For each field, the names of the call in both vendors' libraries.
struct Names {
#define KV_NAME(field, type, cuda, hip, required) std::array<const char*, 2> field{cuda, hip};
    KV_DRIVER_SYMBOLS(KV_NAME)
#undef KV_NAME
};
constexpr Names NAMES;

// Longer lists fault the device on ROCm; on CUDA cutting them costs nothing.
constexpr size_t BATCH_MAX = 8192;

// CUmemcpyAttributes: the source is read in stream order; the driver finds the location of the bytes itself.
struct CopyAttributes {
    int access_order = 1;
    int source_location[2] = {0, 0};
    int target_location[2] = {0, 0};
    unsigned flags = 0;
};
static_assert(sizeof(CopyAttributes) == 24);

// A list of copies in the form of the batch calls. One per thread, reused because these lists are long and frequent.
struct Columns {
    std::vector<Address> host;
    std::vector<Address> device;
    std::vector<size_t> bytes;
};
thread_local Columns columns;

void* as_pointer(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

#define KV_CALL(field, ...) check(calls_.field(__VA_ARGS__), NAMES.field)

// The value that a call writes through its first argument.
#define KV_GET(type, field, ...)                           \
    [&] {                                                  \
        type value{};                                      \
        KV_CALL(field, &value __VA_OPT__(, ) __VA_ARGS__); \
        return value;                                      \
    }()

const char* name_of(Vendor vendor) { return vendor == Vendor::CUDA ? "cuda" : "rocm"; }

DriverError::DriverError(const std::string& call_, int code_, const std::string& code_name_)
    : std::runtime_error(call_ + ": " + code_name_ + " (" + std::to_string(code_) + ")"),
      call(call_),
      code(code_),
      code_name(code_name_) {}

Driver::Driver(Probe probe, const Symbols& calls)
    : vendor_(probe.vendor),
      library_(std::move(probe.library)),
      version_(probe.version),
      calls_(calls),
      batch_works_(calls.copy_batch8 || calls.copy_batch9),
      contexts_(static_cast<size_t>(probe.devices), nullptr) {}

void Driver::check(int code, const std::array<const char*, 2>& names) const {
    if (code == SUCCESS) return;
    const char* name = nullptr;
    if (cuda()) {
        calls_.cuda_error_name(code, &name);
    } else {
        name = calls_.hip_error_name(code);
    }
    throw DriverError(names[cuda() ? 0 : 1], code, name ? name : "unknown error");
}

// ---------------------------------------------------------------- devices

int Driver::devices() const { return KV_GET(int, device_count); }

int Driver::device(int ordinal) const { return KV_GET(int, device_get, ordinal); }

std::string Driver::device_name(int ordinal) const {
    char text[256] = {};
    KV_CALL(device_name, text, sizeof text - 1, device(ordinal));
    return text;
}

std::array<std::byte, 16> Driver::device_uuid(int ordinal) const {
    std::array<std::byte, 16> uuid{};
    if (calls_.device_uuid2) {  // distinguishes the slices of one GPU (MIG)
        KV_CALL(device_uuid2, uuid.data(), device(ordinal));
    } else {
        KV_CALL(device_uuid, uuid.data(), device(ordinal));
    }
    return uuid;
}

std::string Driver::device_pci(int ordinal) const {
    char text[64] = {};
    KV_CALL(device_pci, text, sizeof text - 1, device(ordinal));
    std::string pci = text;
    std::transform(pci.begin(), pci.end(), pci.begin(), [](unsigned char c) { return std::tolower(c); });
    return pci;
}

int Driver::multiprocessors(int ordinal) const {
    return cuda() ? KV_GET(int, device_attribute, CUDA_MULTIPROCESSORS, device(ordinal)) : 256;
}

std::string Driver::arch(int ordinal) const {
    // The numbers of HIP's attributes changed between releases, and its struct of properties has many layouts.
    if (!cuda()) return kfd_arch("/sys/class/kfd/kfd/topology/nodes", device_pci(ordinal));
    return format("sm_%d%d", KV_GET(int, device_attribute, CUDA_CAPABILITY_MAJOR, device(ordinal)),
                  KV_GET(int, device_attribute, CUDA_CAPABILITY_MINOR, device(ordinal)));
}

void* Driver::primary(int ordinal) const {
    const std::scoped_lock held(contexts_lock_);
    void*& context = contexts_.at(static_cast<size_t>(ordinal));
    if (!context) KV_CALL(primary_retain, &context, device(ordinal));
    return context;
}

void* Driver::enter(int ordinal) const {
    if (cuda()) {
        KV_CALL(ctx_push, primary(ordinal));
        return nullptr;
    }
    const int before = KV_GET(int, get_device);
    KV_CALL(set_device, ordinal);
    return reinterpret_cast<void*>(static_cast<intptr_t>(before));
}

void Driver::leave(void* before) const {
    if (cuda()) {
        KV_GET(void*, ctx_pop);
    } else {
        KV_CALL(set_device, static_cast<int>(reinterpret_cast<intptr_t>(before)));
    }
}

void Driver::relax_capture_mode() const {
    int mode = CAPTURE_RELAXED;
    if (calls_.capture_mode) KV_CALL(capture_mode, &mode);
}

// ---------------------------------------------------------------- memory

Driver::Memory Driver::memory() const {
    Memory memory{};
    KV_CALL(memory_info, &memory.free_bytes, &memory.total_bytes);
    return memory;
}

std::optional<Address> Driver::alloc(uint64_t bytes) const {
    Address memory = 0;
    const int code = calls_.alloc(&memory, bytes);
    if (code == OUT_OF_MEMORY) return std::nullopt;
    check(code, NAMES.alloc);
    return memory;
}

void Driver::free(Address memory) const { KV_CALL(free, memory); }

Driver::Range Driver::address_range(Address memory) const {
    Range range{};
    KV_CALL(address_range, &range.base, &range.bytes, memory);
    return range;
}

std::optional<int> Driver::device_of(Address memory) const {
    int ordinal = 0;
    if (!calls_.pointer_attribute) return std::nullopt;
    if (calls_.pointer_attribute(&ordinal, POINTER_DEVICE_ORDINAL, memory) != SUCCESS) return std::nullopt;
    return ordinal;
}

std::optional<bool> Driver::ipc_capable(Address memory) const {
    uint64_t capable = 0;  // of which the driver writes one byte, or four
    if (!calls_.pointer_attribute) return std::nullopt;
    if (calls_.pointer_attribute(&capable, POINTER_IPC_CAPABLE, memory) != SUCCESS) return std::nullopt;
    return capable != 0;
}

IpcHandle Driver::ipc_get(Address base) const { return KV_GET(IpcHandle, ipc_get, base); }

Address Driver::ipc_open(const IpcHandle& handle) const {
    return KV_GET(Address, ipc_open, handle, IPC_LAZY_PEER_ACCESS);
}

void Driver::ipc_close(Address memory) const { KV_CALL(ipc_close, memory); }

void* Driver::host_alloc(uint64_t bytes) const { return KV_GET(void*, host_alloc, bytes, HOST_PORTABLE | HOST_MAPPED); }

void Driver::host_free(void* memory) const { KV_CALL(host_free, memory); }

bool Driver::can_register() const { return calls_.host_register && calls_.host_unregister; }

void Driver::host_register(void* memory, uint64_t bytes) const {
    KV_ASSERT(can_register());
    KV_CALL(host_register, memory, bytes, HOST_PORTABLE | HOST_MAPPED);
}

void Driver::host_unregister(void* memory) const { KV_CALL(host_unregister, memory); }

Address Driver::host_address(void* memory) const { return KV_GET(Address, host_device_pointer, memory, 0); }

// ---------------------------------------------------------------- copies

void Driver::copy(Way way, void* host, Address device, uint64_t bytes, StreamPointer stream) const {
    if (cuda() && way == Way::TO_HOST) {
        KV_CALL(copy_to_host, host, device, bytes, stream);
    } else if (cuda()) {
        KV_CALL(copy_to_device, device, host, bytes, stream);
    } else if (way == Way::TO_HOST) {
        KV_CALL(copy_of_kind, host, as_pointer(device), bytes, HIP_COPY_TO_HOST, stream);
    } else {
        KV_CALL(copy_of_kind, as_pointer(device), host, bytes, HIP_COPY_TO_DEVICE, stream);
    }
}

void Driver::copy_batch(Way way, std::span<const BatchCopy> copies, StreamPointer stream) const {
    while (!copies.empty()) {
        const auto batch = copies.first(std::min(copies.size(), BATCH_MAX));
        if (!has_batch() || !enqueue_batch(way, batch, stream)) {
            for (const auto& [host, device, bytes] : batch) copy(way, as_pointer(host), device, bytes, stream);
        }
        copies = copies.subspan(batch.size());
    }
}

// Enqueues a batch. False when this driver does not support it: nothing was enqueued, and it is not tried again.
bool Driver::enqueue_batch(Way way, std::span<const BatchCopy> copies, StreamPointer stream) const {
    columns.host.clear();
    columns.device.clear();
    columns.bytes.clear();
    for (const auto& [host, device, bytes] : copies) {
        columns.host.push_back(host);
        columns.device.push_back(device);
        columns.bytes.push_back(bytes);
    }
    Address* const to = (way == Way::TO_HOST ? columns.host : columns.device).data();
    Address* const from = (way == Way::TO_HOST ? columns.device : columns.host).data();
    CopyAttributes attributes;
    size_t first = 0;
    size_t failed = 0;
    // ROCm returns NotSupported for any attribute, CUDA requires exactly this.
    void* const given = cuda() ? &attributes : nullptr;
    size_t* const indices = cuda() ? &first : nullptr;
    const size_t given_count = cuda() ? 1 : 0;
    const int code = calls_.copy_batch8 ? calls_.copy_batch8(to, from, columns.bytes.data(), copies.size(), given,
                                                             indices, given_count, stream)
                                        : calls_.copy_batch9(to, from, columns.bytes.data(), copies.size(), given,
                                                             indices, given_count, &failed, stream);
    if (code == NOT_SUPPORTED) {
        batch_works_.store(false, std::memory_order_relaxed);
        return false;
    }
    check(code, calls_.copy_batch8 ? NAMES.copy_batch8 : NAMES.copy_batch9);
    return true;
}

// ---------------------------------------------------------------- streams, events, kernels

StreamPointer Driver::stream_create(bool high_priority) const {
    int least = 0;
    int greatest = 0;
    KV_CALL(priority_range, &least, &greatest);
    return KV_GET(StreamPointer, stream_create, STREAM_NON_BLOCKING, high_priority ? greatest : least);
}

void Driver::stream_destroy(StreamPointer stream) const { KV_CALL(stream_destroy, stream); }

void Driver::stream_wait(StreamPointer stream, EventPointer event) const { KV_CALL(stream_wait, stream, event, 0); }

EventPointer Driver::event_create() const { return KV_GET(EventPointer, event_create, EVENT_DISABLE_TIMING); }

void Driver::event_destroy(EventPointer event) const { KV_CALL(event_destroy, event); }

void Driver::event_record(EventPointer event, StreamPointer stream) const { KV_CALL(event_record, event, stream); }

bool Driver::stream_done(StreamPointer stream) const {
    const int code = calls_.stream_query(stream);
    if (code == NOT_READY) return false;
    check(code, NAMES.stream_query);
    return true;
}

bool Driver::event_done(EventPointer event) const {
    const int code = calls_.event_query(event);
    if (code == NOT_READY) return false;
    check(code, NAMES.event_query);
    return true;
}

ModulePointer Driver::module_load(const void* image) const { return KV_GET(ModulePointer, module_load, image); }

void Driver::module_unload(ModulePointer module) const { KV_CALL(module_unload, module); }

FunctionPointer Driver::module_function(ModulePointer module, const char* name) const {
    return KV_GET(FunctionPointer, module_function, module, name);
}

void Driver::launch(FunctionPointer function, unsigned blocks, unsigned threads, StreamPointer stream,
                    void** arguments) const {
    KV_CALL(launch, function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr);
}

}  // namespace kv::gpu
