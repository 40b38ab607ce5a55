// The entry points: each is a function of its name in the table, exported under the vendor's name by the assembler.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "sim.h"

#define KVSIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace sim {

const char* name_of(Symbol symbol) {
    static const char* const names[] = {
#ifdef SIM_HIP
#define KV_NAME(field, type, cuda, hip, required) hip,
#else
#define KV_NAME(field, type, cuda, hip, required) cuda,
#endif
        KV_DRIVER_SYMBOLS(KV_NAME)
#undef KV_NAME
    };
    return names[static_cast<unsigned>(symbol)];
}

namespace {

#define ENTER(symbol, needs) \
    if (const int code = enter(Symbol::symbol, Needs::needs)) return code

struct Name {
    int code;
    const char* cuda;
    const char* hip;
};

constexpr Name NAMES[] = {
    {SUCCESS, "CUDA_SUCCESS", "hipSuccess"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "hipErrorInvalidValue"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "hipErrorNotInitialized"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "hipErrorNoDevice"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "hipErrorInvalidDevice"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "hipErrorInvalidImage"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "hipErrorInvalidContext"},
    {ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "hipErrorAlreadyMapped"},
    {NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU", "hipErrorNoBinaryForGpu"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "hipErrorInvalidHandle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "hipErrorNotFound"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "hipErrorNotReady"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "hipErrorHostMemoryAlreadyRegistered"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "hipErrorHostMemoryNotRegistered"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "hipErrorLaunchFailure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "hipErrorNotSupported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "hipErrorStreamCaptureUnsupported"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "hipErrorStreamCaptureInvalidated"},
};

const char* error_name(int code) {
    for (const Name& name : NAMES) {
        if (name.code == code) return HIP ? name.hip : name.cuda;
    }
    return HIP ? "hipErrorUnknown" : "CUDA_ERROR_UNKNOWN";
}

// The device of an ordinal, or null.
const Device* known(int ordinal) {
    const int device = device_of_ordinal(ordinal);
    return device < 0 ? nullptr : &state().devices[device];
}

int text_of(char* text, int bytes, const char* value) {
    std::snprintf(text, static_cast<size_t>(bytes), "%s", value);
    return SUCCESS;
}

}  // namespace

namespace call {

namespace raw = kv::gpu::raw;

// Each has the type that the table says, and a name for the assembler.
#define KV_DECLARE(field, type, cuda, hip, required) \
    static std::remove_pointer_t<type> field __asm__("kvsim_call_" #field) __attribute__((used));
KV_DRIVER_SYMBOLS(KV_DECLARE)
#undef KV_DECLARE

static int init(unsigned flags) {
    if (flags != 0) return INVALID_VALUE;
    if (const int code = attach()) return code;
    ENTER(init, DRIVER);
    return ordinals() > 0 ? SUCCESS : NO_DEVICE;
}
static int version(int* version) {
    if (const int code = attach()) return code;  // the only call that may precede init
    ENTER(version, NOTHING);
    *version = state().header.driver_version;
    return SUCCESS;
}
static int device_count(int* count) {
    ENTER(device_count, DRIVER);
    *count = ordinals();
    return SUCCESS;
}
static int device_get(int* device, int ordinal) {
    ENTER(device_get, DRIVER);
    *device = ordinal;
    return known(ordinal) ? SUCCESS : INVALID_DEVICE;
}
static int device_name(char* text, int bytes, int ordinal) {
    ENTER(device_name, DRIVER);
    return known(ordinal) ? text_of(text, bytes, known(ordinal)->name) : INVALID_DEVICE;
}
static int device_uuid(void* uuid, int ordinal) {
    ENTER(device_uuid, DRIVER);
    if (!known(ordinal)) return INVALID_DEVICE;
    std::memcpy(uuid, known(ordinal)->uuid, sizeof known(ordinal)->uuid);
    return SUCCESS;
}
static int device_uuid2(void* uuid, int ordinal) {
    ENTER(device_uuid2, DRIVER);
    if (!known(ordinal)) return INVALID_DEVICE;
    std::memcpy(uuid, known(ordinal)->uuid, sizeof known(ordinal)->uuid);
    return SUCCESS;
}
static int device_pci(char* text, int bytes, int ordinal) {
    ENTER(device_pci, DRIVER);
    return known(ordinal) ? text_of(text, bytes, known(ordinal)->pci) : INVALID_DEVICE;
}
static int device_attribute(int* value, int attribute, int ordinal) {
    ENTER(device_attribute, DRIVER);
    const Device* device = known(ordinal);
    if (!device) return INVALID_DEVICE;
    switch (attribute) {
        case kv::gpu::CUDA_MULTIPROCESSORS:
            *value = static_cast<int>(device->multiprocessors);
            return SUCCESS;
        case kv::gpu::CUDA_CAPABILITY_MAJOR:
            *value = static_cast<int>(device->capability / 10);
            return SUCCESS;
        case kv::gpu::CUDA_CAPABILITY_MINOR:
            *value = static_cast<int>(device->capability % 10);
            return SUCCESS;
        default:
            return INVALID_VALUE;
    }
}
static int cuda_error_name(int code, const char** name) {
    *name = error_name(code);
    return SUCCESS;
}
static const char* hip_error_name(int code) { return error_name(code); }

static int primary_retain(void** context, int ordinal) {
    ENTER(primary_retain, DRIVER);
    return retain_context(context, ordinal);
}
static int ctx_push(void* context) {
    ENTER(ctx_push, DRIVER);
    return push_context(context);
}
static int ctx_pop(void** context) {
    ENTER(ctx_pop, DRIVER);
    return pop_context(context);
}
static int set_device(int ordinal) {
    ENTER(set_device, DRIVER);
    return set_ordinal(ordinal);
}
static int get_device(int* ordinal) {
    ENTER(get_device, DRIVER);
    return get_ordinal(ordinal);
}
static int capture_mode(int* mode) {
    ENTER(capture_mode, DRIVER);
    return exchange_capture_mode(mode);
}

static int memory_info(size_t* free, size_t* total) {
    ENTER(memory_info, DEVICE);
    const auto device = static_cast<unsigned>(current_device());
    const StateLock lock;
    *total = state().devices[device].total_bytes;
    *free = *total - used_bytes(device);
    return SUCCESS;
}
static int alloc(Address* memory, size_t bytes) {
    ENTER(alloc, DEVICE);
    return allocate(memory, bytes, true);
}
static int free(Address memory) {
    ENTER(free, DEVICE);
    return release(memory);
}
static int address_range(Address* base, size_t* bytes, Address memory) {
    ENTER(address_range, DEVICE);
    return sim::address_range(base, bytes, memory);
}
static int pointer_attribute(void* value, int attribute, Address memory) {
    ENTER(pointer_attribute, DRIVER);
    return sim::pointer_attribute(value, attribute, memory);
}
static int ipc_get(IpcHandle* handle, Address base) {
    ENTER(ipc_get, DEVICE);
    return sim::ipc_get(handle, base);
}
static int ipc_open(Address* memory, IpcHandle handle, unsigned flags) {
    ENTER(ipc_open, DEVICE);
    return sim::ipc_open(memory, handle, flags);
}
static int ipc_close(Address memory) {
    ENTER(ipc_close, DEVICE);
    return sim::ipc_close(memory);
}

static int host_alloc(void** memory, size_t bytes, unsigned flags) {
    ENTER(host_alloc, DEVICE);
    return flags == (kv::gpu::HOST_PORTABLE | kv::gpu::HOST_MAPPED) ? host_allocate(memory, bytes) : INVALID_VALUE;
}
static int host_free(void* memory) {
    ENTER(host_free, DEVICE);
    return host_release(memory);
}
static int host_register(void* memory, size_t bytes, unsigned flags) {
    ENTER(host_register, DEVICE);
    return sim::host_register(memory, bytes, flags);
}
static int host_unregister(void* memory) {
    ENTER(host_unregister, DEVICE);
    return sim::host_unregister(memory);
}
static int host_device_pointer(Address* device, void* memory, unsigned) {
    ENTER(host_device_pointer, DEVICE);
    return sim::host_device_pointer(device, memory);
}

static int copy_to_host(void* to, Address from, size_t bytes, void* stream) {
    ENTER(copy_to_host, DEVICE);
    return sim::copy_to_host(to, from, bytes, stream);
}
static int copy_to_device(Address to, const void* from, size_t bytes, void* stream) {
    ENTER(copy_to_device, DEVICE);
    return sim::copy_to_device(to, from, bytes, stream);
}
static int copy_of_kind(void* to, const void* from, size_t bytes, int kind, void* stream) {
    ENTER(copy_of_kind, DEVICE);
    if (kind == kv::gpu::HIP_COPY_TO_HOST) {
        return sim::copy_to_host(to, reinterpret_cast<Address>(from), bytes, stream);
    }
    if (kind == kv::gpu::HIP_COPY_TO_DEVICE) {
        return sim::copy_to_device(reinterpret_cast<Address>(to), from, bytes, stream);
    }
    return INVALID_VALUE;
}
static int copy_batch9(Address* to, Address* from, size_t* bytes, size_t count, void* attributes,
                       size_t* attribute_indices, size_t attribute_count, size_t* failed, void* stream) {
    ENTER(copy_batch9, DEVICE);
    if (failed) *failed = SIZE_MAX;
    return copy_batch(to, from, bytes, count, attributes, attribute_indices, attribute_count, stream);
}
static int copy_batch8(Address* to, Address* from, size_t* bytes, size_t count, void* attributes,
                       size_t* attribute_indices, size_t attribute_count, void* stream) {
    ENTER(copy_batch8, DEVICE);
    return copy_batch(to, from, bytes, count, attributes, attribute_indices, attribute_count, stream);
}

static int priority_range(int* least, int* greatest) {
    ENTER(priority_range, DEVICE);
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}
static int stream_create(void** stream, unsigned flags, int) {
    ENTER(stream_create, DEVICE);
    return sim::stream_create(stream, flags);
}
static int stream_destroy(void* stream) {
    ENTER(stream_destroy, DRIVER);
    return sim::stream_destroy(stream);
}
static int stream_wait(void* stream, void* event, unsigned flags) {
    ENTER(stream_wait, DRIVER);
    return flags == 0 ? sim::stream_wait(stream, event) : INVALID_VALUE;
}
static int stream_query(void* stream) {
    ENTER(stream_query, DRIVER);
    return sim::stream_query(stream);
}
static int event_create(void** event, unsigned flags) {
    ENTER(event_create, DEVICE);
    return flags == kv::gpu::EVENT_DISABLE_TIMING ? sim::event_create(event) : INVALID_VALUE;
}
static int event_destroy(void* event) {
    ENTER(event_destroy, DRIVER);
    return sim::event_destroy(event);
}
static int event_record(void* event, void* stream) {
    ENTER(event_record, DRIVER);
    return sim::event_record(event, stream);
}
static int event_query(void* event) {
    ENTER(event_query, DRIVER);
    return sim::event_query(event);
}

static int module_load(void** module, const void* image) {
    ENTER(module_load, DEVICE);
    return sim::module_load(module, image);
}
static int module_unload(void* module) {
    ENTER(module_unload, DRIVER);
    return sim::module_unload(module);
}
static int module_function(void** function, void* module, const char* name) {
    ENTER(module_function, DRIVER);
    return sim::module_function(function, module, name);
}
static int launch(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra) {
    ENTER(launch, DEVICE);
    if (grid_y * grid_z * block_y * block_z != 1 || shared_bytes != 0 || extra) return INVALID_VALUE;
    return sim::launch(function, grid_x, block_x, stream, arguments);
}

}  // namespace call

// A call that the vendor does not have stands as nullptr in the table, and is not exported.
#define KV_EXPORT(name, field)                                         \
    __asm__(".ifnc " #name ", nullptr\n.globl " #name "\n.type " #name \
            ", @function\n"                                            \
            ".set " #name ", kvsim_call_" #field "\n.endif");
#ifdef SIM_HIP
#define KV_EXPORT_ENTRY(field, type, cuda, hip, required) KV_EXPORT(hip, field)
#else
#define KV_EXPORT_ENTRY(field, type, cuda, hip, required) KV_EXPORT(cuda, field)
#endif
KV_DRIVER_SYMBOLS(KV_EXPORT_ENTRY)

}  // namespace sim

// ---------------------------------------------------------------- for tests only

// Device memory as the host sees it, to fill and to compare; null when there is none of that address.
KVSIM_EXPORT void* kvsim_host(sim::Address memory) {
    const std::shared_lock lock(sim::table_lock());
    return sim::at(memory, 1, -1);
}

// Memory of an expandable segment: it works, and cannot be exported.
KVSIM_EXPORT int kvsim_alloc_vmm(sim::Address* memory, size_t bytes) { return sim::allocate(memory, bytes, false); }

// A stream capture of the global mode; its end says whether some call has spoiled it.
KVSIM_EXPORT void kvsim_begin_capture() { sim::begin_capture(); }
KVSIM_EXPORT int kvsim_end_capture() { return sim::end_capture(); }

#ifdef SIM_HIP
// Events of another process leak, stall or hang on ROCm: nobody may use them.
KVSIM_EXPORT int hipIpcGetEventHandle(void*, void*) { std::abort(); }
KVSIM_EXPORT int hipIpcOpenEventHandle(void**, sim::IpcHandle) { std::abort(); }
#endif
