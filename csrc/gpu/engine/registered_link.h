// The link with the arena registered with the driver, unit by unit: DMA goes directly between device memory and slots.

#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "base/shared_memory.h"
#include "gpu/engine/link.h"

namespace kv::gpu {

class RegisteredLink : public Link {
  public:
    // `arena` must outlive it. Registers nothing yet. unit_bytes: size of the pieces that are registered; copies are
    // cut at its multiples, because the device addresses of two units need not be adjacent.
    RegisteredLink(const Driver& driver, const Mapping& arena, uint64_t unit_bytes);
    ~RegisteredLink() override;

    std::string name() const override { return "register"; }
    bool reaches(uint64_t arena_offset, uint64_t bytes) override;
    std::unique_ptr<LinkTask> begin(Way way, std::vector<LinkCopy> copies, const Event* after) override;
    void arena_ready(uint64_t bytes) override;
    Prepared prepare(bool wanted_only) override;

  private:
    std::vector<LinkCopy> cut(const std::vector<LinkCopy>& copies) const;
    void register_unit(uint64_t unit);
    void enqueue(Way way, const std::vector<LinkCopy>& copies, const Stream& stream) const;

    const Driver& driver_;
    const Mapping& arena_;
    const uint64_t unit_bytes_;
    // The streams of one direction. Tasks of few large copies go to the first stream, so that they end in the order in
    // which they began; one stream with work keeps a copy engine busy. Tasks of many small copies alternate: a copy of
    // one stream fills the gap between two copies of the other.
    struct Lane {
        Lane(const Driver& driver, bool high_priority);
        const Stream& take(bool few_copies) { return few_copies ? streams[0] : streams[turn++ % streams.size()]; }
        std::array<Stream, 2> streams;
        size_t turn = 0;
    };
    Lane to_arena_;
    Lane to_device_;
    std::vector<std::atomic<Address>> units_;  // device address of each unit, 0 = not registered

    std::mutex mutex_;  // guards everything below
    uint64_t units_ready_ = 0;
    uint64_t next_ = 0;
    std::deque<uint64_t> wanted_;
};

}  // namespace kv::gpu
