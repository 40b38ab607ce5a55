// For LD_PRELOAD: what a process opens below /sys/class/kfd/ it opens below the directory KVSIM_KFD instead.
//
// AMD's driver does not tell a device's architecture in a form that all releases share, its kernel module does, there.
// It redirects the calls of std::filesystem, of our own reader and of Python's open(), and nothing else.

#include <dlfcn.h>
#include <fcntl.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

#define KVSIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr const char PREFIX[] = "/sys/class/kfd/";

std::string redirected(const char* path) {
    const std::string asked = path;
    const char* const directory = std::getenv("KVSIM_KFD");
    if (!directory || asked.compare(0, sizeof PREFIX - 1, PREFIX) != 0) return asked;
    return std::string(directory) + "/" + asked.substr(sizeof PREFIX - 1);
}

template <typename Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// The mode is only there when a file may be made, and handed on whether or not.
KVSIM_EXPORT int open(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const auto mode = va_arg(rest, unsigned);
    va_end(rest);
    static auto* const real = next<int(const char*, int, ...)>("open");
    return real(redirected(path).c_str(), flags, mode);
}

KVSIM_EXPORT int open64(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const auto mode = va_arg(rest, unsigned);
    va_end(rest);
    static auto* const real = next<int(const char*, int, ...)>("open64");
    return real(redirected(path).c_str(), flags, mode);
}

KVSIM_EXPORT int openat(int directory, const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const auto mode = va_arg(rest, unsigned);
    va_end(rest);
    static auto* const real = next<int(int, const char*, int, ...)>("openat");
    return real(directory, redirected(path).c_str(), flags, mode);
}

KVSIM_EXPORT FILE* fopen64(const char* path, const char* how) {
    static auto* const real = next<FILE*(const char*, const char*)>("fopen64");
    return real(redirected(path).c_str(), how);
}
