#include "gpu/engine/bounce_link.h"

#include <algorithm>
#include <list>
#include <utility>

#include "base/check.h"
#include "base/named_thread.h"

namespace kv::gpu {
namespace {

constexpr uint64_t CREW_PIECE_BYTES = 1 << 20;

}  // namespace

// ------------------------------------------------------------------ CopyCrew

CopyCrew::CopyCrew(int threads) {
    KV_ASSERT(threads > 0);
    for (int i = 0; i < threads; ++i) threads_.push_back(start_thread(format("kv-bounce-%d", i), [this] { work(); }));
}

CopyCrew::~CopyCrew() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void CopyCrew::begin(const std::vector<Copy>& copies, std::atomic<uint32_t>& left) {
    std::vector<Piece> pieces;
    for (const Copy& copy : copies) {
        for (uint64_t at = 0; at < copy.bytes; at += CREW_PIECE_BYTES) {
            const uint64_t bytes = std::min(copy.bytes - at, CREW_PIECE_BYTES);
            pieces.push_back({{copy.source + at, copy.target + at, bytes}, &left});
        }
    }
    KV_ASSERT(left == 0);
    left = static_cast<uint32_t>(pieces.size());
    {
        const std::lock_guard lock(mutex_);
        pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
    }
    ready_.notify_all();
}

void CopyCrew::work() {
    std::unique_lock lock(mutex_);
    while (!closing_) {
        if (pieces_.empty()) {
            ready_.wait(lock);
            continue;
        }
        const Piece piece = pieces_.front();
        pieces_.pop_front();
        lock.unlock();
        run_copies({&piece.copy, 1}, Through::MEMORY);
        piece.left->fetch_sub(1);
        lock.lock();
    }
}

// ------------------------------------------------------------------ BounceTask

// Uses the buffers of its lane one after the other: each gets as many bytes of the copies as fit.
class BounceTask : public LinkTask {
  public:
    BounceTask(BounceLink& link, Way way, std::vector<LinkCopy> copies)
        : link_(link),
          lane_(way == Way::TO_ARENA ? link.to_arena_ : link.to_device_),
          way_(way),
          copies_(std::move(copies)) {}

    bool advance() override {
        for (auto load = loads_.begin(); load != loads_.end();) {
            load = advance_load(*load) ? loads_.erase(load) : std::next(load);
        }
        while (next_ < copies_.size()) {
            BounceLink::Buffer* const buffer = free_buffer();
            if (buffer == nullptr) break;
            begin_load(loads_.emplace_back(fill(*buffer)));
        }
        return next_ == copies_.size() && loads_.empty();
    }

  private:
    enum class Step { TRANSFER, COPY };  // by the device, by the crew
    // The content of one buffer. Steps TO_ARENA: transfer, copy. TO_DEVICE: copy, transfer.
    struct Load {
        BounceLink::Buffer* buffer;
        std::vector<LinkCopy> parts;  // back to back in the buffer
        Step step;
    };

    BounceLink::Buffer* free_buffer() {
        for (BounceLink::Buffer& buffer : lane_.buffers) {
            if (!buffer.taken) return &buffer;
        }
        return nullptr;
    }

    Load fill(BounceLink::Buffer& buffer) {
        buffer.taken = true;
        Load load{&buffer, {}, way_ == Way::TO_ARENA ? Step::TRANSFER : Step::COPY};
        for (uint64_t room = link_.buffer_bytes_; room > 0 && next_ < copies_.size();) {
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
            if (way_ == Way::TO_ARENA) {
                link_.driver_.copy_to_host(host, part.device, part.bytes, lane_.stream.get());
            } else {
                link_.driver_.copy_to_device(part.device, host, part.bytes, lane_.stream.get());
            }
            host += part.bytes;
        }
        load.buffer->event.record(lane_.stream);
    }

    void copy(Load& load) {
        std::vector<Copy> copies;
        std::byte* host = load.buffer->data;
        for (const LinkCopy& part : load.parts) {
            std::byte* const slot = link_.arena_.data() + part.arena_offset;
            copies.push_back(way_ == Way::TO_ARENA ? Copy{host, slot, part.bytes} : Copy{slot, host, part.bytes});
            host += part.bytes;
        }
        link_.crew_.begin(copies, load.buffer->left);
    }

    // True when the load has arrived and its buffer is free.
    bool advance_load(Load& load) {
        const bool ended = load.step == Step::TRANSFER ? load.buffer->event.done() : load.buffer->left == 0;
        if (!ended) return false;
        const Step last = way_ == Way::TO_ARENA ? Step::COPY : Step::TRANSFER;
        if (load.step == last) {
            load.buffer->taken = false;
            return true;
        }
        load.step = last;
        begin_load(load);
        return false;
    }

    BounceLink& link_;
    BounceLink::Lane& lane_;
    const Way way_;
    std::vector<LinkCopy> copies_;
    size_t next_ = 0;  // copies before it are loaded
    std::list<Load> loads_;
};

// ------------------------------------------------------------------ BounceLink

BounceLink::Lane::Lane(const Driver& driver, uint64_t buffer_bytes)
    : stream(driver, /*high_priority=*/false), memory(driver, BOUNCE_BUFFERS * buffer_bytes) {
    for (uint32_t i = 0; i < BOUNCE_BUFFERS; ++i) buffers.emplace_back(driver, memory.data() + i * buffer_bytes);
}

BounceLink::BounceLink(const Driver& driver, const Mapping& arena, uint64_t buffer_bytes, int threads)
    : driver_(driver),
      arena_(arena),
      buffer_bytes_(buffer_bytes),
      to_arena_(driver, buffer_bytes),
      to_device_(driver, buffer_bytes),
      crew_(threads) {}

std::unique_ptr<LinkTask> BounceLink::begin(Way way, std::vector<LinkCopy> copies, const Event* after) {
    const Lane& lane = way == Way::TO_ARENA ? to_arena_ : to_device_;
    if (after != nullptr) driver_.stream_wait(lane.stream.get(), after->get());
    auto task = std::make_unique<BounceTask>(*this, way, std::move(copies));
    task->advance();
    return task;
}

}  // namespace kv::gpu
