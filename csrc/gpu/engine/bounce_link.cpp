// The link through pinned buffers of our own, with threads that copy between them and the arena: for drivers that
// cannot register shared memory. The DMA of one buffer and the copying of the previous one run at the same time.

#include <algorithm>
#include <atomic>
#include <deque>
#include <list>
#include <utility>

#include "base/check.h"
#include "base/threads.h"
#include "copy/copy_kernels.h"
#include "gpu/engine/link.h"

namespace kv::gpu {
namespace {

constexpr uint64_t CREW_PIECE_BYTES = 1 << 20;
constexpr uint32_t BUFFERS = 4;  // for each direction

struct Buffer {
    Buffer(const Driver& driver, std::byte* data_) : data(data_), event(driver) {}
    std::byte* data;
    Event event;
    std::atomic<uint32_t> left{0};  // pieces that the crew has not copied yet
    bool taken = false;
};

// One direction: only its thread touches it.
struct Lane {
    Lane(const Driver& driver, uint64_t buffer_bytes)
        : stream(driver, /*high_priority=*/false), memory(driver, BUFFERS * buffer_bytes) {
        for (uint32_t i = 0; i < BUFFERS; ++i) buffers.emplace_back(driver, memory.data() + i * buffer_bytes);
    }
    Stream stream;
    PinnedMemory memory;
    std::deque<Buffer> buffers;
};

// The tools of tasks in both directions.
struct Means {
    const Driver& driver;
    const Mapping& arena;
    const uint64_t buffer_bytes;
    Crew crew;
};

// Uses the buffers of its lane one after the other: each gets as many bytes of the copies as fit.
class BounceTask : public LinkTask {
  public:
    BounceTask(Means& means, Lane& lane, Way way, std::vector<LinkCopy> copies)
        : means_(means), lane_(lane), way_(way), copies_(std::move(copies)) {}

    bool advance() override {
        for (auto load = loads_.begin(); load != loads_.end();) {
            load = advance_load(*load) ? loads_.erase(load) : std::next(load);
        }
        while (next_ < copies_.size()) {
            const auto is_free = [](const Buffer& buffer) { return !buffer.taken; };
            const auto buffer = std::find_if(lane_.buffers.begin(), lane_.buffers.end(), is_free);
            if (buffer == lane_.buffers.end()) break;
            begin_load(loads_.emplace_back(fill(*buffer)));
        }
        return next_ == copies_.size() && loads_.empty();
    }

  private:
    enum class Step { TRANSFER, COPY };  // by the device, by the crew
    // The content of one buffer. Steps TO_HOST: transfer, copy. TO_DEVICE: copy, transfer.
    struct Load {
        Buffer* buffer;
        std::vector<LinkCopy> parts;  // back to back in the buffer
        Step step;
    };

    Load fill(Buffer& buffer) {
        buffer.taken = true;
        Load load{&buffer, {}, way_ == Way::TO_HOST ? Step::TRANSFER : Step::COPY};
        for (uint64_t room = means_.buffer_bytes; room > 0 && next_ < copies_.size();) {
            LinkCopy& copy = copies_[next_];
            const uint64_t bytes = std::min(copy.bytes, room);
            load.parts.push_back({copy.device, copy.arena_offset, bytes});
            copy.device += bytes;
            copy.arena_offset += bytes;
            copy.bytes -= bytes;
            room -= bytes;
            if (copy.bytes == 0) ++next_;
        }
        return load;
    }

    void begin_load(Load& load) {
        if (load.step == Step::TRANSFER) {
            transfer(load);
        } else {
            copy(load);
        }
    }

    void transfer(Load& load) {
        std::byte* host = load.buffer->data;
        for (const LinkCopy& part : load.parts) {
            means_.driver.copy(way_, host, part.device, part.bytes, lane_.stream.get());
            host += part.bytes;
        }
        load.buffer->event.record(lane_.stream);
    }

    void copy(Load& load) {
        std::atomic<uint32_t>& left = load.buffer->left;
        KV_ASSERT(left == 0);
        std::vector<Crew::Task> tasks;
        std::byte* host = load.buffer->data;
        for (const LinkCopy& part : load.parts) {
            std::byte* const slot = means_.arena.data() + part.arena_offset;
            for (uint64_t at = 0; at < part.bytes; at += CREW_PIECE_BYTES) {
                const uint64_t bytes = std::min(part.bytes - at, CREW_PIECE_BYTES);
                const bool out = way_ == Way::TO_HOST;
                const Copy piece{out ? host + at : slot + at, out ? slot + at : host + at, bytes};
                tasks.push_back([piece, &left] {
                    run_copies({&piece, 1}, Through::MEMORY);
                    --left;
                });
            }
            host += part.bytes;
        }
        left = static_cast<uint32_t>(tasks.size());
        means_.crew.add(tasks);
    }

    // True when the load has arrived and its buffer is free.
    bool advance_load(Load& load) {
        const bool ended = load.step == Step::TRANSFER ? load.buffer->event.done() : load.buffer->left == 0;
        if (!ended) return false;
        const Step last = way_ == Way::TO_HOST ? Step::COPY : Step::TRANSFER;
        if (load.step == last) {
            load.buffer->taken = false;
            return true;
        }
        load.step = last;
        begin_load(load);
        return false;
    }

    Means& means_;
    Lane& lane_;
    const Way way_;
    std::vector<LinkCopy> copies_;
    size_t next_ = 0;  // copies before it are loaded
    std::list<Load> loads_;
};

class BounceLink : public Link {
  public:
    BounceLink(const Driver& driver, const Mapping& arena, uint64_t buffer_bytes, size_t threads)
        : to_arena_(driver, buffer_bytes),
          to_device_(driver, buffer_bytes),
          means_{driver, arena, buffer_bytes, Crew("kv-bounce", threads)} {}

    std::string name() const override { return "bounce"; }
    bool reaches(uint64_t, uint64_t) override { return true; }
    void arena_ready(uint64_t) override {}
    Prepared prepare(bool) override { return Prepared::ALL; }

    std::unique_ptr<LinkTask> begin(Way way, std::vector<LinkCopy> copies, const Event* after) override {
        Lane& lane = way == Way::TO_HOST ? to_arena_ : to_device_;
        if (after != nullptr) means_.driver.stream_wait(lane.stream.get(), after->get());
        auto task = std::make_unique<BounceTask>(means_, lane, way, std::move(copies));
        task->advance();
        return task;
    }

  private:
    Lane to_arena_;
    Lane to_device_;
    Means means_;  // last: its threads stop before the memory is freed
};

}  // namespace

std::unique_ptr<Link> make_bounce_link(const Driver& driver, const Mapping& arena, uint64_t buffer_bytes, int threads) {
    return std::make_unique<BounceLink>(driver, arena, buffer_bytes, static_cast<size_t>(threads));
}

}  // namespace kv::gpu
