// The way between device memory and the arena.
//
// Two kinds: the arena registered with the driver, so that DMA reaches it (registered_link.h), or pinned memory of our
// own in between, and threads that copy (bounce_link.h).
//
// Each direction belongs to one thread, its pump; the device is current there. Nothing here ever blocks.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/shared_memory.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/handles.h"

namespace kv::gpu {

struct LinkCopy {
    Address device;
    uint64_t arena_offset;
    uint64_t bytes;
};

enum class Way { TO_ARENA, TO_DEVICE };

// What prepare() found: one piece, which is ready now; none, but some that nobody has asked for yet; none at all.
enum class Prepared { ONE, LATER, ALL };

// Copies under way. It must not be destroyed before advance() was true, unless the driver is broken.
class LinkTask {
  public:
    virtual ~LinkTask() = default;
    // Does what can be done now. True once all bytes are in place. DriverError: the context is broken.
    virtual bool advance() = 0;
};

class Link {
  public:
    virtual ~Link() = default;
    virtual std::string name() const = 0;
    // Whether these bytes of the arena can be copied. False: they are made ready next, ask again.
    virtual bool reaches(uint64_t arena_offset, uint64_t bytes) = 0;
    // Copies that reaches() was true for. `after`: the first byte waits for it on the device; null = at once.
    virtual std::unique_ptr<LinkTask> begin(Way way, std::vector<LinkCopy> copies, const Event* after) = 0;

    // Any thread: the arena's first bytes are in use from now on.
    virtual void arena_ready(uint64_t bytes) = 0;
    // House thread: makes one more piece of the arena ready, of `wanted_only` those that reaches() was false for.
    virtual Prepared prepare(bool wanted_only) = 0;
};

struct LinkOptions {
    uint64_t unit_bytes;    // that are registered at a time
    uint64_t bounce_bytes;  // of one buffer where the arena cannot be registered
    int bounce_threads;
};

// `reach`: "register", "bounce", or "auto" for what the vendor is known to do well. Refusal("arena-reach").
std::unique_ptr<Link> make_link(const Driver& driver, const std::string& reach, const Mapping& arena,
                                const LinkOptions& options);

}  // namespace kv::gpu
