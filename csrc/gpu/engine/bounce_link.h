// The link through pinned buffers of our own, with threads that copy between them and the arena: for drivers that
// cannot register shared memory. The DMA of one buffer and the copying of the previous one run at the same time.

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/shared_memory.h"
#include "copy/copy_kernels.h"
#include "gpu/engine/link.h"

namespace kv::gpu {

constexpr uint32_t BOUNCE_BUFFERS = 4;  // for each direction

// Threads that copy between mapped memory. `left` of a batch reaches 0 when all its copies are done and visible.
class CopyCrew {
  public:
    explicit CopyCrew(int threads);
    ~CopyCrew();
    // `left` must be 0; copies are cut into pieces that several threads share.
    void begin(const std::vector<Copy>& copies, std::atomic<uint32_t>& left);

  private:
    struct Piece {
        Copy copy;
        std::atomic<uint32_t>* left;
    };
    void work();

    std::mutex mutex_;
    std::condition_variable ready_;
    std::deque<Piece> pieces_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

class BounceLink : public Link {
  public:
    // `arena` must outlive it. Takes 2 * BOUNCE_BUFFERS * buffer_bytes of pinned memory.
    BounceLink(const Driver& driver, const Mapping& arena, uint64_t buffer_bytes, int threads);

    std::string name() const override { return "bounce"; }
    bool reaches(uint64_t, uint64_t) override { return true; }
    std::unique_ptr<LinkTask> begin(Way way, std::vector<LinkCopy> copies, const Event* after) override;
    void arena_ready(uint64_t) override {}
    Prepared prepare(bool) override { return Prepared::ALL; }

  private:
    friend class BounceTask;
    struct Buffer {
        Buffer(const Driver& driver, std::byte* data_) : data(data_), event(driver) {}
        std::byte* data;
        Event event;
        std::atomic<uint32_t> left{0};
        bool taken = false;
    };
    // One direction: only its thread touches it.
    struct Lane {
        Lane(const Driver& driver, uint64_t buffer_bytes);
        Stream stream;
        PinnedMemory memory;
        std::deque<Buffer> buffers;
    };

    const Driver& driver_;
    const Mapping& arena_;
    const uint64_t buffer_bytes_;
    Lane to_arena_;
    Lane to_device_;
    CopyCrew crew_;  // last: its threads stop before the memory is freed
};

}  // namespace kv::gpu
