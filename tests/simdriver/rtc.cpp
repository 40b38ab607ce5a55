// The run-time compiler of the same vendor, in the same library: it reads the architecture, and compiles nothing.
//
// A rule on "rtc_compile" makes it fail.

#include <cstdio>
#include <cstring>
#include <string>

#include "sim.h"

#define KVSIM_EXPORT extern "C" __attribute__((visibility("default")))
#ifdef SIM_HIP
#define RTC(name) hiprtc##name
#else
#define RTC(name) nvrtc##name
#endif

namespace {

constexpr int COMPILATION_FAILED = 6;
constexpr int INVALID_INPUT = 3;

struct Program {
    std::string source;
    std::string code;
    std::string log;
};

Program* program_of(void* handle) { return static_cast<Program*>(handle); }

std::string arch_in(int count, const char* const* options) {
    constexpr char FLAG[] = "--gpu-architecture=";
    constexpr size_t FLAG_BYTES = sizeof FLAG - 1;
    for (int index = 0; index < count; index++) {
        if (std::strncmp(options[index], FLAG, FLAG_BYTES) == 0) return options[index] + FLAG_BYTES;
    }
    return "";
}

int copy_text(char* to, const std::string& text) {
    std::memcpy(to, text.c_str(), text.size() + 1);
    return sim::SUCCESS;
}

}  // namespace

KVSIM_EXPORT int RTC(Version)(int* major, int* minor) {
    if (const int code = sim::attach()) return code;
    *major = static_cast<int>(sim::state().header.compiler_version);
    *minor = 0;
    return sim::SUCCESS;
}

KVSIM_EXPORT int RTC(CreateProgram)(void** program, const char* source, const char*, int headers,
                                    const char* const* contents, const char* const*) {
    auto* made = new Program{source, "", ""};
    for (int index = 0; index < headers; index++) made->source += contents[index];
    *program = made;
    return sim::SUCCESS;
}

KVSIM_EXPORT int RTC(CompileProgram)(void* handle, int count, const char* const* options) {
    Program* program = program_of(handle);
    const std::string arch = arch_in(count, options);
    const int code = sim::attach() ? 0 : sim::consult("rtc_compile").code;
    if (code != 0 || arch.empty()) {
        program->log = "simulated: error: " + (arch.empty() ? std::string("no architecture") : std::to_string(code));
        return COMPILATION_FAILED;
    }
    program->code = sim::code_for(arch, program->source);
    return sim::SUCCESS;
}

KVSIM_EXPORT int RTC(GetProgramLogSize)(void* handle, size_t* bytes) {
    *bytes = program_of(handle)->log.size() + 1;
    return sim::SUCCESS;
}

KVSIM_EXPORT int RTC(GetProgramLog)(void* handle, char* log) { return copy_text(log, program_of(handle)->log); }

static int code_bytes(void* handle, size_t* bytes) {
    *bytes = program_of(handle)->code.size() + 1;
    return program_of(handle)->code.empty() ? INVALID_INPUT : sim::SUCCESS;
}

#ifdef SIM_HIP
KVSIM_EXPORT int hiprtcGetCodeSize(void* handle, size_t* bytes) { return code_bytes(handle, bytes); }
KVSIM_EXPORT int hiprtcGetCode(void* handle, char* code) { return copy_text(code, program_of(handle)->code); }
#else
KVSIM_EXPORT int nvrtcGetCUBINSize(void* handle, size_t* bytes) { return code_bytes(handle, bytes); }
KVSIM_EXPORT int nvrtcGetCUBIN(void* handle, char* code) { return copy_text(code, program_of(handle)->code); }
#endif

KVSIM_EXPORT int RTC(DestroyProgram)(void** program) {
    delete program_of(*program);
    *program = nullptr;
    return sim::SUCCESS;
}

KVSIM_EXPORT const char* RTC(GetErrorString)(int code) {
    return code == COMPILATION_FAILED ? "COMPILATION_ERROR" : "INVALID_INPUT";
}
