// The links between device memory and the arena alone, on the simulated driver: many tasks at once in both directions,
// odd sizes, buffers and units far smaller than the copies, every byte compared.
//
//   links cuda|rocm LIBRARY register|bounce UNIT_BYTES BUFFER_BYTES SEED
//
// Prints what went on and exits 0 when every byte is where it belongs; 1 when one is not, or when the bytes of a task
// that ended are not there; 3 when the driver failed, and what had ended until then is right.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/shared_memory.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/handles.h"
#include "gpu/engine/link.h"

using namespace kv;
using namespace kv::gpu;

namespace {

constexpr uint64_t HALF_BYTES = 300'007;  // of the arena and of the device: read in one direction, written in the other
constexpr uint64_t ARENA_BYTES = (2 * HALF_BYTES + 4095) / 4096 * 4096;
constexpr uint64_t COPY_BYTES_MAX = 20'011;
constexpr size_t COPIES_MAX = 9;  // of a task: the registered link makes batches of more than 4
constexpr size_t TASKS_MAX = 5;   // that run at once in one direction: more than a lane has buffers
constexpr int BOUNCE_THREADS = 3;
constexpr std::chrono::seconds DEADLINE{20};
constexpr std::chrono::microseconds PAUSE{20};

struct Piece {
    uint64_t from;
    uint64_t to;
    uint64_t bytes;
};

// Both halves cut into the same pieces, in another order on either side.
std::vector<Piece> pieces_of(std::mt19937_64& random) {
    std::vector<uint64_t> sizes;
    for (uint64_t left = HALF_BYTES; left > 0; left -= sizes.back()) {
        sizes.push_back(std::min(left, 1 + random() % COPY_BYTES_MAX));
    }
    std::vector<Piece> pieces;
    uint64_t from = 0;
    for (const uint64_t bytes : sizes) pieces.push_back({from, 0, bytes}), from += bytes;
    std::shuffle(pieces.begin(), pieces.end(), random);
    uint64_t to = 0;
    for (Piece& piece : pieces) piece.to = to, to += piece.bytes;
    std::shuffle(pieces.begin(), pieces.end(), random);
    return pieces;
}

std::vector<std::byte> random_bytes(std::mt19937_64& random, uint64_t count) {
    std::vector<std::byte> bytes(count);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
}

// What a direction reads and writes, by the host's view, and the pieces that have arrived.
struct Direction {
    Way way;
    std::vector<Piece> pieces;
    std::vector<std::byte> source;
    std::vector<Piece> arrived;
    std::string problem;
    std::vector<std::unique_ptr<LinkTask>> lost;  // under way when the driver failed: nobody may destroy them
};

class Trial {
  public:
    Trial(const Driver& driver, const std::string& path, uint64_t unit_bytes, uint64_t buffer_bytes, uint64_t seed)
        : driver_(driver),
          random_(seed),
          file_(create_memfd("links", ARENA_BYTES, 0, true)),
          arena_(file_.get(), ARENA_BYTES, "the arena"),
          out_{Way::TO_HOST, pieces_of(random_), random_bytes(random_, HALF_BYTES), {}, "", {}},
          in_{Way::TO_DEVICE, pieces_of(random_), random_bytes(random_, HALF_BYTES), {}, "", {}},
          device_(DeviceMemory::take(driver, 2 * HALF_BYTES).value()),
          staging_(driver, 2 * HALF_BYTES),
          stream_(driver, false),
          gate_(driver),
          link_(make_link(driver, path, arena_, {unit_bytes, buffer_bytes, BOUNCE_THREADS})) {
        std::memcpy(staging_.data(), out_.source.data(), HALF_BYTES);
        std::memcpy(arena_.data() + HALF_BYTES, in_.source.data(), HALF_BYTES);
        driver_.copy(Way::TO_DEVICE, staging_.data(), device_.address(), HALF_BYTES, stream_.get());
        gate_.record(stream_);  // what tasks wait for: until then the device holds nothing
        link_->arena_ready(ARENA_BYTES);
        while (link_->prepare(/*wanted_only=*/false) == Prepared::ONE) continue;
    }

    // "" or what is wrong.
    std::string run() {
        std::thread out([this] { pump(out_, 11); });
        std::thread in([this] { pump(in_, 13); });
        out.join(), in.join();
        if (!compare_arena()) return "wrong bytes in the arena";
        if (!failed() && !compare_device()) return "wrong bytes on the device";
        for (const Direction* way : {&out_, &in_}) {
            if (way->arrived.size() != way->pieces.size() && way->problem.empty()) return "a task did not end";
        }
        return "";
    }

    std::string problem() const { return out_.problem.empty() ? in_.problem : out_.problem; }
    bool failed() const { return !problem().empty(); }

  private:
    // One direction's thread: some tasks at a time, each looked at until it has ended.
    void pump(Direction& direction, uint64_t seed) {
        struct Running {
            std::unique_ptr<LinkTask> task;
            std::vector<Piece> pieces;
        };
        std::mt19937_64 random(seed);
        std::vector<Running> running;
        size_t next = 0;
        const auto deadline = std::chrono::steady_clock::now() + DEADLINE;
        try {
            const Current current(driver_, 0);
            while (next < direction.pieces.size() || !running.empty()) {
                while (next < direction.pieces.size() && running.size() < TASKS_MAX) {
                    const size_t count = std::min(1 + random() % COPIES_MAX, direction.pieces.size() - next);
                    const auto first = direction.pieces.begin() + static_cast<ptrdiff_t>(next);
                    std::vector<Piece> some(first, first + static_cast<ptrdiff_t>(count));
                    running.push_back({begin(direction.way, some), some});
                    next += count;
                }
                const size_t ended = std::erase_if(running, [&](Running& one) {
                    if (!one.task->advance()) return false;
                    direction.arrived.insert(direction.arrived.end(), one.pieces.begin(), one.pieces.end());
                    return true;
                });
                if (ended == 0) std::this_thread::sleep_for(PAUSE);  // the streams' threads need the cores
                if (std::chrono::steady_clock::now() > deadline) return;
            }
        } catch (const DriverError& error) {
            direction.problem = error.what();
            for (Running& one : running) direction.lost.push_back(std::move(one.task));
        }
    }

    std::unique_ptr<LinkTask> begin(Way way, const std::vector<Piece>& pieces) {
        std::vector<LinkCopy> copies;
        for (const Piece& piece : pieces) {
            const bool out = way == Way::TO_HOST;
            const Address device = device_.address() + (out ? piece.from : HALF_BYTES + piece.to);
            const uint64_t arena = out ? piece.to : HALF_BYTES + piece.from;
            if (!link_->reaches(arena, piece.bytes)) throw DriverError("reaches", -1, "not registered");
            copies.push_back({device, arena, piece.bytes});
        }
        return link_->begin(way, std::move(copies), way == Way::TO_HOST ? &gate_ : nullptr);
    }

    bool compare_arena() const {
        return std::ranges::all_of(out_.arrived, [this](const Piece& piece) {
            return std::memcmp(arena_.data() + piece.to, out_.source.data() + piece.from, piece.bytes) == 0;
        });
    }

    bool compare_device() {
        const Current current(driver_, 0);
        driver_.copy(Way::TO_HOST, staging_.data(), device_.address(), 2 * HALF_BYTES, stream_.get());
        gate_.record(stream_);
        while (!gate_.done()) std::this_thread::yield();
        const bool kept = std::memcmp(staging_.data(), out_.source.data(), HALF_BYTES) == 0;
        return kept && std::ranges::all_of(in_.arrived, [this](const Piece& piece) {
                   return std::memcmp(staging_.data() + HALF_BYTES + piece.to, in_.source.data() + piece.from,
                                      piece.bytes) == 0;
               });
    }

    const Driver& driver_;
    std::mt19937_64 random_;
    Descriptor file_;
    Mapping arena_;
    Direction out_, in_;
    DeviceMemory device_;
    PinnedMemory staging_;
    Stream stream_;
    Event gate_;
    std::unique_ptr<Link> link_;
};

int run(char** arguments) {
    const Vendor vendor = std::string(arguments[1]) == "cuda" ? Vendor::CUDA : Vendor::ROCM;
    const auto number = [&](int index) { return std::strtoull(arguments[index], nullptr, 10); };
    try {
        const Driver& driver = Driver::open(vendor, arguments[2]);
        const Current current(driver, 0);
        // Never freed: after a failure nobody knows what the device still does, and the process ends.
        auto* const trial = new Trial(driver, arguments[3], number(4), number(5), number(6));
        const std::string wrong = trial->run();
        std::printf("%s\n", wrong.empty() ? trial->problem().c_str() : wrong.c_str());
        std::fflush(stdout);
        std::_Exit(!wrong.empty() ? 1 : trial->failed() ? 3 : 0);
    } catch (const DriverError& error) {
        std::printf("%s\n", error.what());
        return 3;
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count == 7) return run(arguments);
    std::fprintf(stderr, "usage: links cuda|rocm LIBRARY register|bounce UNIT_BYTES BUFFER_BYTES SEED\n");
    return 2;
}
