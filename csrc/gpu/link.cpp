#include "gpu/link.h"

#include "check.h"
#include "gpu/bounce_link.h"
#include "gpu/registered_link.h"

namespace kv::gpu {

std::unique_ptr<Link> make_link(const Driver& driver, const std::string& path, const Mapping& arena,
                                const LinkOptions& options) {
    // ROCm registers memory of a memfd on some releases only, and says so too late.
    const bool prefer_register = driver.vendor() == Vendor::CUDA;
    if (path == "register" || (path == "auto" && prefer_register)) {
        if (!driver.can_register()) {
            throw Refusal("arena-path", driver.library() + " has no call that registers host memory");
        }
        return std::make_unique<RegisteredLink>(driver, arena, options.unit_bytes);
    }
    if (path == "bounce" || path == "auto") {
        return std::make_unique<BounceLink>(driver, arena, options.bounce_bytes, options.bounce_threads);
    }
    throw Refusal("arena-path", "\"" + path + "\" must be register, bounce or auto");
}

}  // namespace kv::gpu
