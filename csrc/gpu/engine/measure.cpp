#include "gpu/engine/measure.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "base/check.h"
#include "gpu/driver/handles.h"

namespace kv::gpu {
namespace {

constexpr uint64_t SCRATCH_BYTES = 64 << 20;
constexpr uint64_t SCRATCH_BYTES_LEAST = 4 << 20;
constexpr uint64_t COPY_BYTES_MIN = 64 << 10;
constexpr uint64_t COPY_BYTES_MAX = 8 << 20;
constexpr double AS_GOOD_AS_STAGED = 0.985;
constexpr double BETTER_THAN_BARE = 0.97;
constexpr int ROUNDS = 3;

DeviceMemory take_scratch(const Driver& driver) {
    for (uint64_t bytes = SCRATCH_BYTES; bytes >= SCRATCH_BYTES_LEAST; bytes /= 2) {
        if (std::optional<DeviceMemory> memory = DeviceMemory::take(driver, bytes)) return std::move(*memory);
    }
    throw Refusal("device-memory", "no 4 MiB of device memory are left to measure the link with");
}

class Bench {
  public:
    explicit Bench(const Driver& driver)
        : driver_(driver),
          device_(take_scratch(driver)),
          host_(driver, device_.bytes()),
          stream_(driver, /*high_priority=*/false),
          event_(driver) {}

    LinkSpeed measure(Way way) {
        const double ceiling =
            gbps([&] { driver_.copy(way, host_.data(), device_.address(), host_.bytes(), stream_.get()); });
        LinkSpeed speed{ceiling, {UINT64_MAX, UINT64_MAX}};
        bool as_good_as_staged = true;
        for (uint64_t bytes = COPY_BYTES_MAX; bytes >= COPY_BYTES_MIN; bytes /= 2) {
            const std::vector<BatchCopy> copies = scattered(bytes);
            const double share = gbps([&] { driver_.copy_batch(way, copies, stream_.get()); }) / ceiling;
            if (share < BETTER_THAN_BARE) break;
            speed.direct_from.bare_bytes = bytes;
            as_good_as_staged = as_good_as_staged && share >= AS_GOOD_AS_STAGED;
            if (as_good_as_staged) speed.direct_from.staged_bytes = bytes;
        }
        return speed;
    }

  private:
    // The rate of the best of some rounds; the first one also warms up.
    double gbps(const std::function<void()>& enqueue) {
        double best = 0;
        for (int round = 0; round < ROUNDS; ++round) {
            const auto begun = std::chrono::steady_clock::now();
            enqueue();
            event_.record(stream_);
            while (!event_.done()) continue;
            const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begun;
            best = std::max(best, static_cast<double>(host_.bytes()) / elapsed.count() / 1e9);
        }
        return best;
    }

    // The rate for all the scratch memory in copies of that length. Neighbours on the host are not adjacent on the
    // device.
    std::vector<BatchCopy> scattered(uint64_t bytes) const {
        constexpr uint64_t STRIDE = 7;  // coprime to every power of two
        const uint64_t count = host_.bytes() / bytes;
        std::vector<BatchCopy> copies;
        for (uint64_t i = 0; i < count; ++i) {
            copies.push_back({host_.address() + i * bytes, device_.address() + i * STRIDE % count * bytes, bytes});
        }
        return copies;
    }

    const Driver& driver_;
    DeviceMemory device_;
    PinnedMemory host_;
    Stream stream_;
    Event event_;
};

}  // namespace

Measured measure(const Driver& driver) {
    Bench bench(driver);
    return {bench.measure(Way::TO_HOST), bench.measure(Way::TO_DEVICE)};
}

}  // namespace kv::gpu
