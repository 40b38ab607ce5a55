// The link with the arena registered with the driver, unit by unit: DMA goes directly between device memory and slots.
// Copies are cut at multiples of a unit, because the device addresses of two units need not be adjacent.

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "gpu/engine/link.h"

namespace kv::gpu {
namespace {

// A batch call costs more than this many single ones.
constexpr size_t SINGLE_COPIES_MAX = 4;

// A task whose copies were all enqueued at the beginning; it only waits for their end.
class EnqueuedCopies : public LinkTask {
  public:
    EnqueuedCopies(const Driver& driver, const Stream& stream) : event_(driver) { event_.record(stream); }
    bool advance() override { return event_.done(); }

  private:
    Event event_;
};

// The streams of one direction. Tasks of few large copies go to the first stream, so that they end in the order in
// which they began; one stream with work keeps a copy engine busy. Tasks of many small copies alternate: a copy of one
// stream fills the gap between two copies of the other.
struct Lane {
    Lane(const Driver& driver, bool high_priority)
        : streams{Stream(driver, high_priority), Stream(driver, high_priority)} {}
    const Stream& take(bool few_copies) { return few_copies ? streams[0] : streams[turn++ % streams.size()]; }

    std::array<Stream, 2> streams;
    size_t turn = 0;
};

class RegisteredLink : public Link {
  public:
    RegisteredLink(const Driver& driver, const Mapping& arena, uint64_t unit_bytes)
        : driver_(driver),
          arena_(arena),
          unit_bytes_(unit_bytes),
          to_arena_(driver, /*high_priority=*/false),
          to_device_(driver, /*high_priority=*/true),
          units_((arena.bytes() + unit_bytes - 1) / unit_bytes) {}

    ~RegisteredLink() override {
        for (uint64_t unit = 0; unit < units_.size(); ++unit) {
            if (units_[unit] == 0) continue;
            try {
                driver_.host_unregister(arena_.data() + unit * unit_bytes_);
            } catch (const DriverError&) {
                return;  // in a broken context every call fails, and the process ends
            }
        }
    }

    std::string name() const override { return "register"; }

    bool reaches(uint64_t arena_offset, uint64_t bytes) override {
        KV_ASSERT(bytes > 0 && arena_offset + bytes <= arena_.bytes());
        bool all = true;
        for (uint64_t unit = arena_offset / unit_bytes_; unit <= (arena_offset + bytes - 1) / unit_bytes_; ++unit) {
            if (units_[unit] != 0) continue;
            all = false;
            const std::lock_guard lock(mutex_);
            if (std::find(wanted_.begin(), wanted_.end(), unit) == wanted_.end()) wanted_.push_back(unit);
        }
        return all;
    }

    std::unique_ptr<LinkTask> begin(Way way, std::vector<LinkCopy> copies, const Event* after) override {
        const std::vector<LinkCopy> parts = cut(copies);
        Lane& lane = way == Way::TO_HOST ? to_arena_ : to_device_;
        const Stream& stream = lane.take(parts.size() <= SINGLE_COPIES_MAX);
        if (after != nullptr) driver_.stream_wait(stream.get(), after->get());
        enqueue(way, parts, stream);
        return std::make_unique<EnqueuedCopies>(driver_, stream);
    }

    void arena_ready(uint64_t bytes) override {
        const std::lock_guard lock(mutex_);
        units_ready_ = bytes >= arena_.bytes() ? units_.size() : bytes / unit_bytes_;
    }

    Prepared prepare(bool wanted_only) override {
        uint64_t unit;
        {
            const std::lock_guard lock(mutex_);
            while (next_ < units_ready_ && units_[next_] != 0) ++next_;
            const auto usable = [&](uint64_t wanted) { return wanted < units_ready_; };
            const auto wanted = std::find_if(wanted_.begin(), wanted_.end(), usable);
            if (wanted != wanted_.end()) {
                unit = *wanted;
                wanted_.erase(wanted);
            } else if (next_ == units_ready_) {
                return Prepared::ALL;
            } else if (wanted_only) {
                return Prepared::LATER;
            } else {
                unit = next_;
            }
        }
        if (units_[unit] != 0) return Prepared::ONE;
        std::byte* const begin = arena_.data() + unit * unit_bytes_;
        driver_.host_register(begin, std::min(unit_bytes_, arena_.bytes() - unit * unit_bytes_));
        units_[unit] = driver_.host_address(begin);
        return Prepared::ONE;
    }

  private:
    std::vector<LinkCopy> cut(const std::vector<LinkCopy>& copies) const {
        std::vector<LinkCopy> parts;
        parts.reserve(copies.size() + 1);
        for (const LinkCopy& copy : copies) {
            for (uint64_t done = 0; done < copy.bytes;) {
                const uint64_t offset = copy.arena_offset + done;
                const uint64_t bytes = std::min(copy.bytes - done, unit_bytes_ - offset % unit_bytes_);
                parts.push_back({copy.device + done, offset, bytes});
                done += bytes;
            }
        }
        return parts;
    }

    void enqueue(Way way, const std::vector<LinkCopy>& copies, const Stream& stream) const {
        if (copies.size() <= SINGLE_COPIES_MAX) {
            for (const auto& [device, arena_offset, bytes] : copies) {
                driver_.copy(way, arena_.data() + arena_offset, device, bytes, stream.get());
            }
            return;
        }
        std::vector<BatchCopy> batch;
        batch.reserve(copies.size());
        for (const auto& [device, arena_offset, bytes] : copies) {
            const Address unit = units_[arena_offset / unit_bytes_];
            KV_ASSERT(unit != 0);
            batch.push_back({unit + arena_offset % unit_bytes_, device, bytes});
        }
        driver_.copy_batch(way, batch, stream.get());
    }

    const Driver& driver_;
    const Mapping& arena_;
    const uint64_t unit_bytes_;
    Lane to_arena_;
    Lane to_device_;
    std::vector<std::atomic<Address>> units_;  // device address of each unit, 0 = not registered

    std::mutex mutex_;  // guards everything below
    uint64_t units_ready_ = 0;
    uint64_t next_ = 0;
    std::deque<uint64_t> wanted_;
};

}  // namespace

std::unique_ptr<Link> make_registered_link(const Driver& driver, const Mapping& arena, uint64_t unit_bytes) {
    return std::make_unique<RegisteredLink>(driver, arena, unit_bytes);
}

}  // namespace kv::gpu
