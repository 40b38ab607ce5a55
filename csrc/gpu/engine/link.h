// The link between device memory and the arena.
//
// Two kinds: the arena is registered with the driver, so that DMA reaches it (registered_link.cpp), or threads copy
// through pinned memory of our own (bounce_link.cpp).
//
// Each direction belongs to one thread, its pump; the device is current there. No call blocks.

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

// The result of prepare(). ONE: one piece was made ready. LATER: only pieces are left that nobody has asked for. ALL:
// no piece is left.
enum class Prepared { ONE, LATER, ALL };

// Copies under way. It must not be destroyed before advance() was true, unless the driver is broken.
class LinkTask {
  public:
    virtual ~LinkTask() = default;
    // Advances the copies without waiting. True once all bytes are in place. DriverError: the context is broken.
    virtual bool advance() = 0;
};

class Link {
  public:
    virtual ~Link() = default;
    virtual std::string name() const = 0;
    // Whether these bytes of the arena can be copied. False: they are made ready next; ask again.
    virtual bool reaches(uint64_t arena_offset, uint64_t bytes) = 0;
    // Begins copies for which reaches() was true. `after`: an event that they wait for on the device; null: none.
    virtual std::unique_ptr<LinkTask> begin(Way way, std::vector<LinkCopy> copies, const Event* after) = 0;

    // Any thread: the arena's first bytes are in use from now on.
    virtual void arena_ready(uint64_t bytes) = 0;
    // House thread: makes one more piece of the arena ready. wanted_only: only pieces for which reaches() was false.
    virtual Prepared prepare(bool wanted_only) = 0;
};

struct LinkOptions {
    uint64_t unit_bytes;    // registered at a time
    uint64_t bounce_bytes;  // size of one buffer if the arena cannot be registered
    int bounce_threads;
};

// Registers nothing yet. `arena` must outlive the links, here and below.
std::unique_ptr<Link> make_registered_link(const Driver& driver, const Mapping& arena, uint64_t unit_bytes);
// Takes pinned memory of eight times buffer_bytes.
std::unique_ptr<Link> make_bounce_link(const Driver& driver, const Mapping& arena, uint64_t buffer_bytes, int threads);

// `reach`: "register", "bounce", or "auto" for the kind that is known to work well with the vendor.
// Refusal("arena-reach").
std::unique_ptr<Link> make_link(const Driver& driver, const std::string& reach, const Mapping& arena,
                                const LinkOptions& options);

}  // namespace kv::gpu
