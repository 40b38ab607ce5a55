// Modules and kernels: code objects are only looked at, the functions are the kernels' source as a host loop.

#include <cstring>
#include <mutex>
#include <set>

#include "sim.h"

namespace sim {
namespace {

// A piece that touches what it must not; ends the kernel.
struct Illegal {};

thread_local int running_device = -1;

unsigned long long resolve(unsigned long long address, unsigned bytes) {
    std::byte* host = at(address, bytes, running_device);
    if (!host) throw Illegal{};
    return reinterpret_cast<unsigned long long>(host);
}

}  // namespace
}  // namespace sim

#define KV_RESOLVE(address, bytes, writes) sim::resolve(address, bytes)
#include "gpu/kernels/kernel_source.h"

namespace sim {
namespace {

constexpr char CODE_MAGIC[] = "KVSIM ";  // then the architecture, a line's end and the source's size
constexpr char BUNDLE_MAGIC[] = "__CLANG_OFFLOAD_BUNDLE__";

char gather_function;
char scatter_function;

std::mutex modules_lock;
std::set<void*>& modules() {
    static auto* all = new std::set<void*>;
    return *all;
}

bool begins_with(const void* image, const char* text) {
    return std::strncmp(static_cast<const char*>(image), text, std::strlen(text)) == 0;
}

// Whether one of a bundle's objects is for that architecture. After the magic: how many, then offset, size and the
// length of its name before each name.
bool bundle_has(const void* image, const std::string& arch) {
    const auto* at = static_cast<const char*>(image) + std::strlen(BUNDLE_MAGIC);
    uint64_t count;
    std::memcpy(&count, at, sizeof count);
    at += sizeof count;
    for (uint64_t index = 0; index < count; index++) {
        uint64_t name_bytes;
        std::memcpy(&name_bytes, at + 2 * sizeof name_bytes, sizeof name_bytes);
        at += 3 * sizeof name_bytes;
        if (std::string(at, name_bytes) == "hipv4-amdgcn-amd-amdhsa--" + arch) return true;
        at += name_bytes;
    }
    return false;
}

int check_image(const void* image) {
    const auto* text = static_cast<const char*>(image);
    const std::string arch = state().devices[current_device()].arch;
    if (begins_with(image, CODE_MAGIC)) {
        return begins_with(text + std::strlen(CODE_MAGIC), (arch + "\n").c_str()) ? SUCCESS : NO_BINARY;
    }
    if (HIP && begins_with(image, BUNDLE_MAGIC)) return bundle_has(image, arch) ? SUCCESS : NO_BINARY;
    return !HIP && std::strstr(text, ".entry kv_gather") ? SUCCESS : INVALID_IMAGE;
}

}  // namespace

std::string code_for(const std::string& arch, const std::string& source) {
    return CODE_MAGIC + arch + "\n" + std::to_string(source.size());
}

int module_load(void** module, const void* image) {
    if (const int code = check_image(image)) return code;
    const std::lock_guard lock(modules_lock);
    *module = new char;
    modules().insert(*module);
    return SUCCESS;
}

int module_unload(void* module) {
    const std::lock_guard lock(modules_lock);
    if (modules().erase(module) == 0) return INVALID_HANDLE;
    delete static_cast<char*>(module);
    return SUCCESS;
}

int module_function(void** function, void* module, const char* name) {
    const std::lock_guard lock(modules_lock);
    if (!modules().contains(module)) return INVALID_HANDLE;
    if (std::strcmp(name, "kv_gather") == 0) {
        *function = &gather_function;
    } else if (std::strcmp(name, "kv_scatter") == 0) {
        *function = &scatter_function;
    } else {
        return NOT_FOUND;
    }
    return SUCCESS;
}

bool read_launch(void* function, void** arguments, Launch& launch) {
    if (function != &gather_function && function != &scatter_function) return false;
    launch.gather = function == &gather_function;
    std::memcpy(&launch.pieces, arguments[0], sizeof launch.pieces);
    std::memcpy(&launch.count, arguments[1], sizeof launch.count);
    std::memcpy(&launch.segment, arguments[2], sizeof launch.segment);
    std::memcpy(&launch.crews, arguments[3], sizeof launch.crews);
    return true;
}

int run_kernel(const Launch& launch, int device) {
    running_device = device;
    const std::byte* pieces = at(launch.pieces, launch.count * sizeof(kv::gpu::Piece), device);
    if (!pieces) return ILLEGAL_ADDRESS;
    try {
        const auto* list = reinterpret_cast<const kv::gpu::Piece*>(pieces);
        (launch.gather ? kv::gpu::kv_gather : kv::gpu::kv_scatter)(list, launch.count, launch.segment, launch.crews);
    } catch (const Illegal&) {
        return ILLEGAL_ADDRESS;
    }
    return SUCCESS;
}

}  // namespace sim
