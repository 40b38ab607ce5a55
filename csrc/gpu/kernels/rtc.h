// The vendor's run-time compiler, NVRTC or HIPRTC, opened at run time when it is there.

#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/driver/driver.h"

namespace kv::gpu {

// The compiler is missing or failed: the built-in objects are used then.
class RtcError : public std::runtime_error {
    using runtime_error::runtime_error;
};

class Rtc {
  public:
    // `library`: a path, or "" for a search, which begins beside the driver in use. RtcError has the attempts.
    Rtc(const Driver& driver, const std::string& library);
    ~Rtc();

    const std::string& name() const { return name_; }  // "nvrtc 13.0"

    // The compiler's options for `arch` ("sm_90", "gfx942").
    std::vector<std::string> options(const std::string& arch) const;
    // The kernels (objects.h) as a code object for `arch`. RtcError carries the compiler's log.
    std::vector<char> compile(const std::string& arch) const;

  private:
    struct Calls;

    const Vendor vendor_;
    std::string name_;
    std::unique_ptr<Calls> calls_;
};

}  // namespace kv::gpu
