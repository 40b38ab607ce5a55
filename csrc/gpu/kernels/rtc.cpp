#include "gpu/kernels/rtc.h"

#include <dlfcn.h>

#include <type_traits>

#include "base/check.h"
#include "gpu/driver/library.h"
#include "gpu/kernels/objects.h"

namespace kv::gpu {

// Both compilers have the same calls with different names: field, type, NVRTC, HIPRTC.
// clang-format off
#define KV_RTC_CALLS(X) \
    X(version, int (*)(int* major, int* minor), "nvrtcVersion", "hiprtcVersion") \
    X(error_text, const char* (*)(int code), "nvrtcGetErrorString", "hiprtcGetErrorString") \
    X(create, int (*)(void** program, const char* source, const char* name, int headers, const char* const* texts, \
                      const char* const* names), "nvrtcCreateProgram", "hiprtcCreateProgram") \
    X(compile, int (*)(void* program, int options, const char* const* texts), \
      "nvrtcCompileProgram", "hiprtcCompileProgram") \
    X(log_bytes, int (*)(void* program, size_t* bytes), "nvrtcGetProgramLogSize", "hiprtcGetProgramLogSize") \
    X(log, int (*)(void* program, char* text), "nvrtcGetProgramLog", "hiprtcGetProgramLog") \
    X(code_bytes, int (*)(void* program, size_t* bytes), "nvrtcGetCUBINSize", "hiprtcGetCodeSize") \
    X(code, int (*)(void* program, char* code), "nvrtcGetCUBIN", "hiprtcGetCode") \
    X(destroy, int (*)(void** program), "nvrtcDestroyProgram", "hiprtcDestroyProgram")
// clang-format on

struct Rtc::Calls {
#define KV_FIELD(field, type, cuda, hip) std::type_identity_t<type> field = nullptr;
    KV_RTC_CALLS(KV_FIELD)
#undef KV_FIELD
};

namespace {

constexpr const char* SOURCE_NAME = "kernel_source.h";
constexpr const char* PIECE_NAME = "gpu/kernels/piece.h";  // as kernel_source.h includes it

// Candidates beside the driver's library come first: they were released with it.
Opened find(const Driver& driver, const std::string& library) {
    const std::string beside = driver.library().substr(0, driver.library().rfind('/') + 1);
    if (driver.vendor() == Vendor::CUDA) {
        return open_library(library, "libnvrtc.so",
                            {beside + "libnvrtc.so.13", beside + "libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.12",
                             "/usr/local/cuda/lib64/libnvrtc.so"});
    }
    return open_library(library, "libhiprtc.so",
                        {beside + "libhiprtc.so.7", beside + "libhiprtc.so.6", "libhiprtc.so.7", "libhiprtc.so.6"});
}

}  // namespace

Rtc::Rtc(const Driver& driver, const std::string& library)
    : vendor_(driver.vendor()), calls_(std::make_unique<Calls>()) {
    const bool cuda = vendor_ == Vendor::CUDA;
    const Opened opened = find(driver, library);
    if (!opened.handle) throw RtcError("no run-time compiler: " + opened.problem);
    const auto look_up = [&](const char* symbol) {
        void* const found = dlsym(opened.handle, symbol);
        if (!found) throw RtcError(opened.path + " lacks " + symbol);
        return found;
    };
#define KV_LOOK_UP(field, type, cuda_name, hip_name) \
    calls_->field = reinterpret_cast<type>(look_up(cuda ? cuda_name : hip_name));
    KV_RTC_CALLS(KV_LOOK_UP)
#undef KV_LOOK_UP
    int major = 0;
    int minor = 0;
    if (calls_->version(&major, &minor) != 0) throw RtcError(opened.path + " does not tell its version");
    name_ = format("%s %d.%d", cuda ? "nvrtc" : "hiprtc", major, minor);
}

Rtc::~Rtc() = default;

std::vector<std::string> Rtc::options(const std::string& arch) const {
    if (vendor_ == Vendor::CUDA) return {"--gpu-architecture=" + arch, "--std=c++17"};
    return {"--gpu-architecture=" + arch, "-O3", "-std=c++17"};
}

std::vector<char> Rtc::compile(const std::string& arch) const {
    const std::string source(kernel_source());
    const std::string piece(piece_header());
    const char* const headers[] = {piece.c_str()};
    const char* const header_names[] = {PIECE_NAME};
    const auto check = [&](int code, const char* step) {
        if (code != 0) throw RtcError(name_ + " " + step + ": " + calls_->error_text(code));
    };

    void* program = nullptr;
    check(calls_->create(&program, source.c_str(), SOURCE_NAME, 1, headers, header_names), "create");
    const auto destroy = [this](void* created) { calls_->destroy(&created); };
    const std::unique_ptr<void, decltype(destroy)> owner(program, destroy);

    const std::vector<std::string> texts = options(arch);
    std::vector<const char*> pointers;
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    if (const int code = calls_->compile(program, static_cast<int>(pointers.size()), pointers.data()); code != 0) {
        size_t bytes = 0;
        check(calls_->log_bytes(program, &bytes), "log");
        std::string log(bytes, '\0');
        if (bytes) check(calls_->log(program, log.data()), "log");
        throw RtcError(name_ + " for " + arch + ": " + calls_->error_text(code) + ": " + log.c_str());
    }
    size_t bytes = 0;
    check(calls_->code_bytes(program, &bytes), "code");
    std::vector<char> code(bytes);
    check(calls_->code(program, code.data()), "code");
    return code;
}

}  // namespace kv::gpu
