#include "gpu/engine/registered_link.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

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

}  // namespace

RegisteredLink::Lane::Lane(const Driver& driver, bool high_priority)
    : streams{Stream(driver, high_priority), Stream(driver, high_priority)} {}

RegisteredLink::RegisteredLink(const Driver& driver, const Mapping& arena, uint64_t unit_bytes)
    : driver_(driver),
      arena_(arena),
      unit_bytes_(unit_bytes),
      to_arena_(driver, /*high_priority=*/false),
      to_device_(driver, /*high_priority=*/true),
      units_((arena.bytes() + unit_bytes - 1) / unit_bytes) {}

RegisteredLink::~RegisteredLink() {
    for (uint64_t unit = 0; unit < units_.size(); ++unit) {
        if (units_[unit] == 0) continue;
        try {
            driver_.host_unregister(arena_.data() + unit * unit_bytes_);
        } catch (const DriverError&) {
            return;  // in a broken context every call fails, and the process ends
        }
    }
}

bool RegisteredLink::reaches(uint64_t arena_offset, uint64_t bytes) {
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

std::unique_ptr<LinkTask> RegisteredLink::begin(Way way, std::vector<LinkCopy> copies, const Event* after) {
    const std::vector<LinkCopy> parts = cut(copies);
    const Stream& stream = (way == Way::TO_ARENA ? to_arena_ : to_device_).take(parts.size() <= SINGLE_COPIES_MAX);
    if (after != nullptr) driver_.stream_wait(stream.get(), after->get());
    enqueue(way, parts, stream);
    return std::make_unique<EnqueuedCopies>(driver_, stream);
}

std::vector<LinkCopy> RegisteredLink::cut(const std::vector<LinkCopy>& copies) const {
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

void RegisteredLink::enqueue(Way way, const std::vector<LinkCopy>& copies, const Stream& stream) const {
    const bool to_host = way == Way::TO_ARENA;
    if (copies.size() <= SINGLE_COPIES_MAX) {
        for (const LinkCopy& copy : copies) {
            std::byte* const host = arena_.data() + copy.arena_offset;
            if (to_host) {
                driver_.copy_to_host(host, copy.device, copy.bytes, stream.get());
            } else {
                driver_.copy_to_device(copy.device, host, copy.bytes, stream.get());
            }
        }
        return;
    }
    std::vector<BatchCopy> batch;
    batch.reserve(copies.size());
    for (const LinkCopy& copy : copies) {
        const Address unit = units_[copy.arena_offset / unit_bytes_];
        KV_ASSERT(unit != 0);
        const Address host = unit + copy.arena_offset % unit_bytes_;
        batch.push_back(to_host ? BatchCopy{host, copy.device, copy.bytes} : BatchCopy{copy.device, host, copy.bytes});
    }
    driver_.copy_batch(batch, to_host, stream.get());
}

// ------------------------------------------------------------------ the house thread's side

void RegisteredLink::arena_ready(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    units_ready_ = std::min(bytes, arena_.bytes()) / unit_bytes_;
    if (bytes >= arena_.bytes()) units_ready_ = units_.size();
}

Prepared RegisteredLink::prepare(bool wanted_only) {
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
    if (units_[unit] == 0) register_unit(unit);
    return Prepared::ONE;
}

void RegisteredLink::register_unit(uint64_t unit) {
    std::byte* const begin = arena_.data() + unit * unit_bytes_;
    driver_.host_register(begin, std::min(unit_bytes_, arena_.bytes() - unit * unit_bytes_));
    units_[unit] = driver_.host_address(begin);
}

}  // namespace kv::gpu
