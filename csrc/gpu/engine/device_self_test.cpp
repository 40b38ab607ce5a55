#include "gpu/engine/device_self_test.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/digest.h"
#include "copy/pattern.h"
#include "gpu/engine/device_job.h"

namespace kv::gpu {
namespace {

constexpr uint64_t ARENA_BYTES = 1 << 20;
constexpr uint64_t UNIT_BYTES = 512 << 10;
constexpr uint64_t SEGMENT_BYTES = 1 << 20;
constexpr std::chrono::seconds DEADLINE{10};

constexpr uint32_t WORD = 3;
constexpr uint64_t BLOCKS = 9, REGIONS = 3, PER_CHUNK = 2;
// Pages as wide as the kernels' loads and narrower, down to single bytes.
constexpr uint64_t PAGES[] = {4096, 136, 132, 66, 333};
constexpr uint64_t SEED = 20240229;
constexpr uint64_t SLOT_STEP = 8 * SLOT_ALIGN;

constexpr uint64_t shard_bytes(uint64_t page) { return REGIONS * PER_CHUNK * page; }

std::shared_ptr<MappedDeviceCache> make_cache(const DeviceMemory& pool) {
    std::vector<Group> groups;
    uint64_t offset = 0;
    for (const uint64_t page : PAGES) {
        groups.push_back({PER_CHUNK, BLOCKS, {{0, offset, REGIONS, BLOCKS * page, page, page}}});
        offset += REGIONS * BLOCKS * page;
    }
    const uint64_t sizes[] = {pool.bytes()};
    auto cache = std::make_shared<MappedDeviceCache>(MappedDeviceCache{0, Layout(std::move(groups), sizes)});
    cache->bases.push_back(pool.address());
    return cache;
}

// Two chunks of each group, in different slots for each group. `sums`: of their shards.
std::vector<CopyGroup> copies_of(const std::vector<int32_t>& block_ids, const std::vector<uint64_t>& sums) {
    std::vector<CopyGroup> copies;
    int64_t slot = 0;
    for (uint64_t group = 0; group < std::size(PAGES); ++group) {
        CopyGroup& copy = copies.emplace_back(CopyGroup{group, 0, block_ids, {}});
        for (uint64_t chunk = 0; chunk < block_ids.size() / PER_CHUNK; ++chunk) {
            copy.slots.push_back(slot);
            slot += static_cast<int64_t>(SLOT_STEP);
        }
        if (!sums.empty()) copy.sums.assign(&sums[copies.size() * 2 - 2], &sums[copies.size() * 2 - 2] + 2);
    }
    return copies;
}

// The expected pool after the blocks `from` were retrieved as the blocks `to`.
void move_blocks(std::byte* pool, const std::vector<int32_t>& from, const std::vector<int32_t>& to) {
    for (const uint64_t page : PAGES) {
        for (uint64_t region = 0; region < REGIONS; ++region, pool += BLOCKS * page) {
            for (size_t i = 0; i < from.size(); ++i) {
                std::memcpy(pool + static_cast<uint64_t>(to[i]) * page, pool + static_cast<uint64_t>(from[i]) * page,
                            page);
            }
        }
    }
}

class SelfTest {
  public:
    SelfTest(const Driver& driver, const Kernels& kernels, const std::string& arena_reach)
        : driver_(driver),
          memory_(create_memfd("kvserver-self-test", ARENA_BYTES, 0, true)),
          words_(create_memfd("kvserver-self-test", SLOT_ALIGN, 0, true)),
          arena_(memory_.get(), ARENA_BYTES, "the self-test's arena"),
          board_(std::make_shared<Board>(words_.get(), WORD + 1)),
          link_(make_link(driver, arena_reach, arena_, {UNIT_BYTES, SEGMENT_BYTES, 1})),
          tables_(driver),
          gatherer_(make_kernel_packer(driver, kernels, tables_, Way::TO_HOST, SEGMENT_BYTES)),
          scatterer_(make_kernel_packer(driver, kernels, tables_, Way::TO_DEVICE, SEGMENT_BYTES)),
          pool_(take_pool(driver)),
          seen_(driver, pool_.bytes()),
          expected_(pool_.bytes()),
          stream_(driver, false),
          event_(driver) {
        std::memset(arena_.data(), 0, ARENA_BYTES);
        for (const uint64_t page : PAGES) tables_.reach(shard_bytes(page));
        link_->arena_ready(ARENA_BYTES);
        while (link_->prepare(/*wanted_only=*/false) == Prepared::ONE) continue;
    }

    std::string run() {
        write_pattern(seen_.data(), seen_.bytes(), SEED);
        std::copy_n(seen_.data(), seen_.bytes(), expected_.data());
        driver_.copy(Way::TO_DEVICE, seen_.data(), pool_.address(), pool_.bytes(), stream_.get());
        wait();
        const std::vector<int32_t> first{5, 0, 3, 6}, second{1, 2, 8, 7}, third{4, 0, 6, 3};
        if (std::string problem = round_trip(JobMode::SERVER_GATHER, first, second); !problem.empty()) return problem;
        return round_trip(JobMode::DIRECT, second, third);
    }

  private:
    static DeviceMemory take_pool(const Driver& driver) {
        uint64_t bytes = 0;
        for (const uint64_t page : PAGES) bytes += REGIONS * BLOCKS * page;
        std::optional<DeviceMemory> pool = DeviceMemory::take(driver, bytes);
        if (!pool) throw Refusal("device-memory", "no device memory is left for a self-test");
        return std::move(*pool);
    }

    std::string round_trip(JobMode mode, const std::vector<int32_t>& from, const std::vector<int32_t>& to) {
        const Completion stored = run(JobKind::STORE, mode, from, {});
        if (stored.status != Status::DONE) return problem_of(stored, mode);
        const std::vector<uint64_t> sums = sums_of_arena();
        if (stored.sums != sums)
            return format("bytes came back wrong, or their sums (%s, %s)", name_of(mode), link_->name().c_str());
        if (std::string problem = flip_a_byte(mode, to, sums); !problem.empty()) return problem;
        const Completion retrieved = run(JobKind::RETRIEVE, mode, to, sums);
        if (retrieved.status != Status::DONE) return problem_of(retrieved, mode);
        move_blocks(expected_.data(), from, to);
        driver_.copy(Way::TO_HOST, seen_.data(), pool_.address(), pool_.bytes(), stream_.get());
        wait();
        if (std::equal(expected_.begin(), expected_.end(), seen_.data())) return {};
        return format("bytes came back wrong (%s, %s)", name_of(mode), link_->name().c_str());
    }

    // A retrieve of a wrong byte must fail, and name its shard.
    std::string flip_a_byte(JobMode mode, const std::vector<int32_t>& to, const std::vector<uint64_t>& sums) {
        constexpr uint32_t SHARD = 3;
        std::byte& flipped = arena_.data()[SHARD * SLOT_STEP + 77];
        flipped ^= std::byte{16};
        const Completion end = run(JobKind::RETRIEVE, mode, to, sums);
        flipped ^= std::byte{16};
        if (end.code == "digest" && end.wrong == std::vector<uint32_t>{SHARD}) return {};
        return format("a flipped byte was not noticed (%s, %s)", name_of(mode), link_->name().c_str());
    }

    // As a processor adds them up.
    std::vector<uint64_t> sums_of_arena() const {
        std::vector<uint64_t> sums;
        for (size_t shard = 0; shard < 2 * std::size(PAGES); ++shard) {
            sums.push_back(kv::digest_sum({arena_.data() + shard * SLOT_STEP, shard_bytes(PAGES[shard / 2])}, 0).sum);
        }
        return sums;
    }

    Completion run(JobKind kind, JobMode mode, const std::vector<int32_t>& block_ids,
                   const std::vector<uint64_t>& sums) {
        const DeviceTools tools{*link_, kind == JobKind::STORE ? *gatherer_ : *scatterer_, arena_, UINT64_MAX};
        const uint64_t generation = board_->begin(WORD);
        DeviceJob job({1, kind, 1, WORD, generation, copies_of(block_ids, sums), /*digests=*/true}, mode,
                      make_cache(pool_), board_, tools);
        const auto deadline = std::chrono::steady_clock::now() + DEADLINE;
        if (job.begin()) {
            while (!job.finished()) {
                if (job.advance(/*alone=*/true) || std::chrono::steady_clock::now() < deadline) continue;
                return {1, Status::BROKEN, 0, 0, "timeout", "it did not end"};
            }
        }
        return job.end();
    }

    std::string problem_of(const Completion& end, JobMode mode) const {
        return format("a %s job ended as %s: %s %s (%s)", name_of(mode), kv::name_of(end.status), end.code.c_str(),
                      end.message.c_str(), link_->name().c_str());
    }

    void wait() {
        event_.record(stream_);
        while (!event_.done()) continue;
    }

    const Driver& driver_;
    Descriptor memory_;
    Descriptor words_;
    Mapping arena_;
    std::shared_ptr<Board> board_;
    std::unique_ptr<Link> link_;
    DigestMemory tables_;
    std::unique_ptr<Packer> gatherer_, scatterer_;
    DeviceMemory pool_;
    PinnedMemory seen_;
    std::vector<std::byte> expected_;
    Stream stream_;
    Event event_;
};

}  // namespace

std::string self_test(const Driver& driver, const Kernels& kernels, const std::string& arena_reach) {
    try {
        return SelfTest(driver, kernels, arena_reach).run();
    } catch (const DriverError& error) {
        return error.what();
    } catch (const Refusal& refusal) {
        return refusal.what();
    }
}

}  // namespace kv::gpu
