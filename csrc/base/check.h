// Errors of the data plane.
//
// KV_ASSERT: we wrote a bug; the process ends with a line that names it. Stays on in release builds.
// bad_argument: the caller passed something wrong; Python gets ValueError.
// Refusal: a client asked for something wrong; begins with a short code for programs. Python gets
// ValueError("code: ...").
// throw_errno: a system call failed; Python gets OSError with that errno.

#pragma once

#include <cstdarg>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kv {

[[noreturn]] void assertion_failed(const char* expression, const char* file, int line);

#define KV_ASSERT(expression) \
    (static_cast<bool>(expression) ? void(0) : ::kv::assertion_failed(#expression, __FILE__, __LINE__))

// printf-style, because C++20's std::format is missing from compilers that we support (GCC before 13).
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));

class Refusal : public std::invalid_argument {
  public:
    Refusal(const std::string& code_, const std::string& message_)
        : std::invalid_argument(code_ + ": " + message_), code(code_), message(message_) {}
    const std::string code;
    const std::string message;
};

[[noreturn]] inline void bad_argument(const std::string& message) { throw std::invalid_argument(message); }

// bad_argument unless the number is in [least, most].
void check_range(const char* name, int64_t number, int64_t least, int64_t most);

// Throws std::system_error for the current errno. `what` names the call and its purpose.
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace kv
