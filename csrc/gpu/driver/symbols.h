// The driver calls that we use, one line each: field, type, name in libcuda, name in libamdhip64, where it is required.
//
// Plain C without vendor headers. int stands for CUresult and hipError_t, whose codes agree as far as we use them;
// void* for streams, events, modules, functions and contexts; Address for device pointers, which HIP writes as void*. A
// name is nullptr if the vendor has no call with this signature. The simulated driver of the tests is made from the
// same table.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kv::gpu {

using Address = uint64_t;  // of device memory, as its driver counts

struct IpcHandle {
    std::byte bytes[64];
};

using StreamPointer = void*;
using EventPointer = void*;
using ModulePointer = void*;
using FunctionPointer = void*;

// ALL: a library without it is refused. CUDA: only libcuda without it is refused. NONE: optional.
enum class Required { ALL, CUDA, NONE };

namespace raw {

using Init = int (*)(unsigned flags);
using Count = int (*)(int* count);
using DeviceGet = int (*)(int* device, int ordinal);
using DeviceText = int (*)(char* text, int bytes, int device);
using DeviceUuid = int (*)(void* sixteen_bytes, int device);
using DeviceAttribute = int (*)(int* value, int attribute, int device);
using CudaErrorName = int (*)(int code, const char** name);
using HipErrorName = const char* (*)(int code);
using PrimaryRetain = int (*)(void** context, int device);
using ContextPush = int (*)(void* context);
using ContextPop = int (*)(void** context);
using SetDevice = int (*)(int ordinal);
using MemoryInfo = int (*)(size_t* free, size_t* total);
using Alloc = int (*)(Address* memory, size_t bytes);
using Free = int (*)(Address memory);
using AddressRange = int (*)(Address* base, size_t* bytes, Address memory);
using PointerAttribute = int (*)(void* value, int attribute, Address memory);
using IpcGet = int (*)(IpcHandle* handle, Address base);
using IpcOpen = int (*)(Address* memory, IpcHandle handle, unsigned flags);
using HostAlloc = int (*)(void** memory, size_t bytes, unsigned flags);
using HostFree = int (*)(void* memory);
using HostRegister = int (*)(void* memory, size_t bytes, unsigned flags);
using HostDevicePointer = int (*)(Address* device, void* memory, unsigned flags);
using CopyToHost = int (*)(void* to, Address from, size_t bytes, void* stream);
using CopyToDevice = int (*)(Address to, const void* from, size_t bytes, void* stream);
using CopyOfKind = int (*)(void* to, const void* from, size_t bytes, int kind, void* stream);
using CopyBatch9 = int (*)(Address* to, Address* from, size_t* bytes, size_t count, void* attributes,
                           size_t* attribute_indices, size_t attribute_count, size_t* failed, void* stream);
using CopyBatch8 = int (*)(Address* to, Address* from, size_t* bytes, size_t count, void* attributes,
                           size_t* attribute_indices, size_t attribute_count, void* stream);
using PriorityRange = int (*)(int* least, int* greatest);
using StreamCreate = int (*)(void** stream, unsigned flags, int priority);
using StreamWait = int (*)(void* stream, void* event, unsigned flags);
using EventCreate = int (*)(void** event, unsigned flags);
using EventRecord = int (*)(void* event, void* stream);
using OfPointer = int (*)(void* object);  // stream, event or module
using ModuleLoad = int (*)(void** module, const void* image);
using ModuleFunction = int (*)(void** function, void* module, const char* name);
using Launch = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
                       void** extra);

}  // namespace raw

// clang-format off
#define KV_DRIVER_SYMBOLS(X) \
    X(init, raw::Init, "cuInit", "hipInit", ALL) \
    X(version, raw::Count, "cuDriverGetVersion", "hipRuntimeGetVersion", ALL) \
    X(device_count, raw::Count, "cuDeviceGetCount", "hipGetDeviceCount", ALL) \
    X(device_get, raw::DeviceGet, "cuDeviceGet", "hipDeviceGet", ALL) \
    X(device_name, raw::DeviceText, "cuDeviceGetName", "hipDeviceGetName", ALL) \
    X(device_uuid, raw::DeviceUuid, "cuDeviceGetUuid", "hipDeviceGetUuid", ALL) \
    X(device_uuid2, raw::DeviceUuid, "cuDeviceGetUuid_v2", nullptr, NONE) \
    X(device_pci, raw::DeviceText, "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId", ALL) \
    X(device_attribute, raw::DeviceAttribute, "cuDeviceGetAttribute", nullptr, CUDA) \
    X(cuda_error_name, raw::CudaErrorName, "cuGetErrorName", nullptr, CUDA) \
    X(hip_error_name, raw::HipErrorName, nullptr, "hipGetErrorName", ALL) \
    X(primary_retain, raw::PrimaryRetain, "cuDevicePrimaryCtxRetain", nullptr, CUDA) \
    X(ctx_push, raw::ContextPush, "cuCtxPushCurrent_v2", nullptr, CUDA) \
    X(ctx_pop, raw::ContextPop, "cuCtxPopCurrent_v2", nullptr, CUDA) \
    X(set_device, raw::SetDevice, nullptr, "hipSetDevice", ALL) \
    X(get_device, raw::Count, nullptr, "hipGetDevice", ALL) \
    X(capture_mode, raw::Count, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode", CUDA) \
    X(memory_info, raw::MemoryInfo, "cuMemGetInfo_v2", "hipMemGetInfo", ALL) \
    X(alloc, raw::Alloc, "cuMemAlloc_v2", "hipMalloc", ALL) \
    X(free, raw::Free, "cuMemFree_v2", "hipFree", ALL) \
    X(address_range, raw::AddressRange, "cuMemGetAddressRange_v2", "hipMemGetAddressRange", ALL) \
    X(pointer_attribute, raw::PointerAttribute, "cuPointerGetAttribute", "hipPointerGetAttribute", CUDA) \
    X(ipc_get, raw::IpcGet, "cuIpcGetMemHandle", "hipIpcGetMemHandle", ALL) \
    X(ipc_open, raw::IpcOpen, "cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle", ALL) \
    X(ipc_close, raw::Free, "cuIpcCloseMemHandle", "hipIpcCloseMemHandle", ALL) \
    X(host_alloc, raw::HostAlloc, "cuMemHostAlloc", "hipHostMalloc", ALL) \
    X(host_free, raw::HostFree, "cuMemFreeHost", "hipHostFree", ALL) \
    X(host_register, raw::HostRegister, "cuMemHostRegister_v2", "hipHostRegister", CUDA) \
    X(host_unregister, raw::HostFree, "cuMemHostUnregister", "hipHostUnregister", CUDA) \
    X(host_device_pointer, raw::HostDevicePointer, "cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer", ALL) \
    X(copy_to_host, raw::CopyToHost, "cuMemcpyDtoHAsync_v2", nullptr, CUDA) \
    X(copy_to_device, raw::CopyToDevice, "cuMemcpyHtoDAsync_v2", nullptr, CUDA) \
    X(copy_of_kind, raw::CopyOfKind, nullptr, "hipMemcpyAsync", ALL) \
    X(copy_batch9, raw::CopyBatch9, "cuMemcpyBatchAsync", "hipMemcpyBatchAsync", NONE) \
    X(copy_batch8, raw::CopyBatch8, "cuMemcpyBatchAsync_v2", nullptr, NONE) \
    X(priority_range, raw::PriorityRange, "cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange", ALL) \
    X(stream_create, raw::StreamCreate, "cuStreamCreateWithPriority", "hipStreamCreateWithPriority", ALL) \
    X(stream_destroy, raw::OfPointer, "cuStreamDestroy_v2", "hipStreamDestroy", ALL) \
    X(stream_wait, raw::StreamWait, "cuStreamWaitEvent", "hipStreamWaitEvent", ALL) \
    X(stream_query, raw::OfPointer, "cuStreamQuery", "hipStreamQuery", ALL) \
    X(event_create, raw::EventCreate, "cuEventCreate", "hipEventCreateWithFlags", ALL) \
    X(event_destroy, raw::OfPointer, "cuEventDestroy_v2", "hipEventDestroy", ALL) \
    X(event_record, raw::EventRecord, "cuEventRecord", "hipEventRecord", ALL) \
    X(event_query, raw::OfPointer, "cuEventQuery", "hipEventQuery", ALL) \
    X(module_load, raw::ModuleLoad, "cuModuleLoadData", "hipModuleLoadData", ALL) \
    X(module_unload, raw::OfPointer, "cuModuleUnload", "hipModuleUnload", ALL) \
    X(module_function, raw::ModuleFunction, "cuModuleGetFunction", "hipModuleGetFunction", ALL) \
    X(launch, raw::Launch, "cuLaunchKernel", "hipModuleLaunchKernel", ALL)
// clang-format on

// The same table as values; a call that the library lacks is null.
struct Symbols {
#define KV_FIELD(field, type, cuda, hip, required) type field = nullptr;
    KV_DRIVER_SYMBOLS(KV_FIELD)
#undef KV_FIELD
};

// Numbers that both vendors share.
constexpr int SUCCESS = 0;
constexpr int INVALID_VALUE = 1;
constexpr int OUT_OF_MEMORY = 2;
constexpr int INVALID_CONTEXT = 201;
constexpr int NOT_READY = 600;
constexpr int NOT_SUPPORTED = 801;
constexpr unsigned STREAM_NON_BLOCKING = 1;
constexpr unsigned EVENT_DISABLE_TIMING = 2;
constexpr unsigned IPC_LAZY_PEER_ACCESS = 1;
constexpr unsigned HOST_PORTABLE = 1;
constexpr unsigned HOST_MAPPED = 2;  // for allocations and registrations
constexpr int CAPTURE_RELAXED = 2;
constexpr int POINTER_DEVICE_ORDINAL = 9;
constexpr int POINTER_IPC_CAPABLE = 10;
constexpr int HIP_COPY_TO_DEVICE = 1;
constexpr int HIP_COPY_TO_HOST = 2;
constexpr int CUDA_MULTIPROCESSORS = 16;
constexpr int CUDA_CAPABILITY_MAJOR = 75;
constexpr int CUDA_CAPABILITY_MINOR = 76;

}  // namespace kv::gpu
