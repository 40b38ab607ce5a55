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
#include "gpu/kernel_source.h"

namespace sim {
namespace {

constexpr char CODE_MAGIC[] = "KVSIM ";  // then the architecture, a line's end and the source's size
constexpr char BUNDLE_MAGIC[] = "__CLANG_OFFLOAD_BUNDLE__";
constexpr char ELF_MAGIC[] = "\177ELF";

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

int check_image(const void* image) {
    const auto* text = static_cast<const char*>(image);
    if (begins_with(image, CODE_MAGIC)) {
        const std::string arch = state().devices[current_device()].arch;
        return begins_with(text + std::strlen(CODE_MAGIC), (arch + "\n").c_str()) ? SUCCESS : NO_BINARY;
    }
    if (HIP) return begins_with(image, BUNDLE_MAGIC) || begins_with(image, ELF_MAGIC) ? SUCCESS : INVALID_IMAGE;
    return std::strstr(text, ".entry kv_gather") ? SUCCESS : INVALID_IMAGE;
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
