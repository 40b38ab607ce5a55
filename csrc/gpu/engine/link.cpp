#include "gpu/engine/link.h"

#include "base/check.h"

namespace kv::gpu {

std::unique_ptr<Link> make_link(const Driver& driver, const std::string& reach, const Mapping& arena,
                                const LinkOptions& options) {
    // Only some releases of ROCm can register memory of a memfd, and the others fail too late.
    const bool prefer_register = driver.vendor() == Vendor::CUDA;
    if (reach == "register" || (reach == "auto" && prefer_register)) {
        if (!driver.can_register()) {
            throw Refusal("arena-reach", driver.library() + " has no call that registers host memory");
        }
        return make_registered_link(driver, arena, options.unit_bytes);
    }
    if (reach == "bounce" || reach == "auto") {
        return make_bounce_link(driver, arena, options.bounce_bytes, options.bounce_threads);
    }
    throw Refusal("arena-reach", "\"" + reach + "\" must be register, bounce or auto");
}

}  // namespace kv::gpu
