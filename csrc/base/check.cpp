#include "base/check.h"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace kv {

void assertion_failed(const char* expression, const char* file, int line) {
    std::fprintf(stderr, "kvserver: %s:%d: assertion failed: %s\n", file, line, expression);
    std::fflush(stderr);
    std::abort();
}

std::string format(const char* text, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, text);
    std::vsnprintf(buffer, sizeof buffer, text, arguments);
    va_end(arguments);
    return buffer;
}

void check_range(const char* name, int64_t number, int64_t least, int64_t most) {
    if (number >= least && number <= most) return;
    bad_argument(format("%s=%" PRId64 " must be in [%" PRId64 ", %" PRId64 "]", name, number, least, most));
}

void throw_errno(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace kv
