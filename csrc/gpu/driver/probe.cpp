// Finding and examining a driver; its calls are in driver.cpp.

#include <dlfcn.h>

#include <map>
#include <memory>

#include "base/check.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/library.h"

namespace kv::gpu {
namespace {

Opened find(Vendor vendor, const std::string& library) {
    if (vendor == Vendor::CUDA) return open_library(library, "libcuda.so", {"libcuda.so.1"});
    const std::string prefix = "/opt/rocm/lib/";
    return open_library(library, "libamdhip64.so",
                        {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", prefix + "libamdhip64.so.7",
                         prefix + "libamdhip64.so.6", prefix + "libamdhip64.so"});
}

Symbols resolve(Vendor vendor, void* handle, Probe& probe) {
    Symbols calls;
    const bool cuda = vendor == Vendor::CUDA;
    const auto look_up = [&](const char* cuda_name, const char* hip_name, Required required) -> void* {
        const char* name = cuda ? cuda_name : hip_name;
        if (!name) return nullptr;
        void* const symbol = dlsym(handle, name);
        if (!symbol) {
            const bool needed = required == Required::ALL || (cuda && required == Required::CUDA);
            (needed ? probe.missing_required : probe.missing_optional).emplace_back(name);
        }
        return symbol;
    };
#define KV_RESOLVE_FIELD(field, type, cuda_name, hip_name, required) \
    calls.field = reinterpret_cast<type>(look_up(cuda_name, hip_name, Required::required));
    KV_DRIVER_SYMBOLS(KV_RESOLVE_FIELD)
#undef KV_RESOLVE_FIELD
    return calls;
}

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

// The vendor's name of an error code, even if the table is incomplete.
std::string error_name(const Symbols& calls, int code) {
    const char* name = nullptr;
    if (calls.cuda_error_name) calls.cuda_error_name(code, &name);
    if (calls.hip_error_name) name = calls.hip_error_name(code);
    return format("%s (%d)", name ? name : "unknown error", code);
}

// Starts the driver and counts its devices. Returns why it cannot be used, or "".
std::string begin(const Symbols& calls, Probe& probe) {
    if (!probe.missing_required.empty()) {
        return "the driver is too old or damaged: it lacks " + joined(probe.missing_required);
    }
    if (const int code = calls.init(0); code != SUCCESS) return "the driver does not start: " + error_name(calls, code);
    if (const int code = calls.version(&probe.version); code != SUCCESS) {
        return "the driver does not tell its version: " + error_name(calls, code);
    }
    if (const int code = calls.device_count(&probe.devices); code != SUCCESS) {
        return "the driver does not count its devices: " + error_name(calls, code);
    }
    return probe.devices > 0 ? "" : "no device is visible";
}

struct Found {
    Probe probe;
    Symbols calls;
};

Found look(Vendor vendor, const std::string& library) {
    Found found{Probe{vendor, "", {}, {}, 0, 0, ""}, {}};
    const Opened opened = find(vendor, library);
    found.probe.library = opened.path;
    if (!opened.handle) {
        found.probe.problem = "no library: " + opened.problem;
        return found;
    }
    found.calls = resolve(vendor, opened.handle, found.probe);
    found.probe.problem = begin(found.calls, found.probe);
    return found;
}

std::string described(const Probe& probe) {
    const std::string where = probe.library.empty() ? "" : " (" + probe.library + ")";
    return std::string(name_of(probe.vendor)) + where + ": " + probe.problem;
}

}  // namespace

Probe probe(Vendor vendor, const std::string& library) { return look(vendor, library).probe; }

const Driver& Driver::open(Vendor vendor, const std::string& library) {
    static std::mutex lock;
    static auto& drivers = *new std::map<std::pair<Vendor, std::string>, std::unique_ptr<Driver>>;
    const std::scoped_lock held(lock);
    std::unique_ptr<Driver>& driver = drivers[{vendor, library}];
    if (!driver) {
        Found found = look(vendor, library);
        if (!found.probe.problem.empty()) throw DriverAbsent(described(found.probe));
        driver.reset(new Driver(std::move(found.probe), found.calls));
    }
    return *driver;
}

}  // namespace kv::gpu
