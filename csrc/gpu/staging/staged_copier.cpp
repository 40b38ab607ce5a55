#include "gpu/staging/staged_copier.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/threads.h"
#include "gpu/driver/handles.h"
#include "gpu/staging/digest_passes.h"
#include "gpu/staging/expand.h"

namespace kv::gpu {
namespace {

constexpr std::chrono::microseconds NAP{20};    // between looks at a kernel that runs, some hundred microseconds
constexpr unsigned long TIMER_SLACK_NS = 1000;  // without it a nap of 20 us takes 70
// The thread polls on for this long after its last work: the next segments of a job are asked for every 300 us, and
// waking a thread takes 30 to 250 us on a virtual machine.
constexpr std::chrono::microseconds LINGER{1000};
constexpr int SLEEP_MS = 1000;  // the bell wakes it; this only bounds the cost of a lost wake-up
constexpr uint64_t PIECE_LIST_BYTES = PIECES_MAX * sizeof(Piece);
constexpr uint64_t MIB = 1 << 20;

// The data of one registration.
struct Ring {
    Ring(uint64_t segment_bytes, Layout layout_, std::vector<Address> bases_)
        : owner(segment_bytes), layout(std::move(layout_)), bases(std::move(bases_)) {}
    RingOwner owner;
    Layout layout;
    std::vector<Address> bases;
};

// A segment of staging while a kernel may work on it. Used by the copier's thread only, except for `number`.
struct Slot {
    explicit Slot(const Driver& driver) : stream(driver, /*high_priority=*/true), event(driver) {}
    // Each segment has its own stream. Beside kernels that fill the GPU, ours begin when one of those ends. In a common
    // stream only the first of ours would begin then, and the next one would wait for another end.
    Stream stream;
    Event event;
    std::shared_ptr<Ring> ring;
    uint64_t sequence = 0;
    SegmentWork work = SegmentWork::COPY;
    uint64_t number = 0;  // counts segments taken in the lane, from 1; 0: idle. Guarded by the mutex
};

DeviceMemory take_staging(const Driver& driver, uint64_t segment_bytes) {
    for (;; segment_bytes = segment_bytes / 2 / MIB * MIB) {
        if (segment_bytes < SEGMENT_BYTES_MIN) break;
        if (auto memory = DeviceMemory::take(driver, LANES * SEGMENTS * segment_bytes)) return std::move(*memory);
    }
    throw Refusal("staging-memory", format("%" PRIu64 " bytes of device memory for staging are not to be had, %" PRIu64
                                           " are free; mode=\"server-gather\" needs none",
                                           LANES * SEGMENTS * SEGMENT_BYTES_MIN, driver.memory().free_bytes));
}

}  // namespace

struct StagedCopier::Work {
    Work(const Driver& driver_, const CopierOptions& options)
        : driver(driver_),
          ordinal(options.ordinal),
          staging(take_staging(driver, options.segment_bytes)),
          segment_bytes(staging.bytes() / (LANES * SEGMENTS)),
          handle(driver.ipc_get(staging.address())),
          kernels(driver, ordinal, options.kernels),
          piece_lists(driver, LANES * SEGMENTS * PIECE_LIST_BYTES),
          tables(driver),
          passes(driver, LANES * SEGMENTS, PIECES_MAX, STRETCHES_MAX),
          event(create_eventfd()) {
        for (uint32_t index = 0; index < LANES * SEGMENTS; ++index) slots.emplace_back(driver);
        pieces.reserve(PIECES_MAX);
        tables.reach(options.shard_bytes);
    }

    // ------------------------------------------------------------ the thread

    void run() {
        ::prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
        std::optional<Current> current;
        try {
            current.emplace(driver, ordinal);
            driver.relax_capture_mode();
        } catch (const DriverError& error) {
            set_broken(error.what());
        }
        auto busy_at = std::chrono::steady_clock::now() - LINGER;
        for (;;) {
            bool moved = false;
            // One of each lane, then a poll of running kernels: the first segment of a job is reported while others are
            // prepared.
            for (const uint32_t lane : {RETRIEVE_LANE, STORE_LANE}) moved |= start_one(lane);
            const bool running = look_after(moved);
            const auto now = std::chrono::steady_clock::now();
            if (moved || running) busy_at = now;
            if (moved) continue;
            if (now - busy_at < LINGER) {
                std::this_thread::sleep_for(NAP);
            } else if (!sleep()) {
                return;
            }
        }
    }

    // Takes a segment of the lane and launches its kernel.
    bool start_one(uint32_t lane) {
        std::shared_ptr<Ring> from;
        std::optional<RingOwner::Asked> asked;
        bool is_broken;
        {
            // Taken and numbered under one lock: a mark made after a job's end comes before or after both.
            const std::lock_guard lock(mutex);
            if (!ring) return false;
            asked = ring->owner.take(lane);
            if (!asked) return false;
            from = ring;
            is_broken = !broken.empty();
            slot(lane, asked->segment).number = ++taken[lane];
        }
        Slot& mine = slot(lane, asked->segment);
        mine.ring = std::move(from);
        mine.sequence = asked->sequence;
        mine.work = asked->work;
        try {
            if (is_broken) {
                end(lane, asked->segment, FAULT_DRIVER);
            } else if (!launch(*asked, mine)) {
                end(lane, asked->segment, FAULT_LIST);
            }
        } catch (const DriverError& error) {
            set_broken(error.what());
            end(lane, asked->segment, FAULT_DRIVER);
        }
        return true;
    }

    // Launches the kernel for a list. False: the list is invalid.
    bool launch(const RingOwner::Asked& asked, Slot& mine) {
        const uint32_t index = asked.lane * SEGMENTS + asked.segment;
        const Address segment = staging.address() + segment_offset(asked.lane, asked.segment, segment_bytes);
        const PassCopy copy = {asked.lane == STORE_LANE ? Way::TO_HOST : Way::TO_DEVICE, segment};
        const bool copies = asked.work != SegmentWork::SUM;
        if (!expand_list(asked, *mine.ring, index, copies ? std::optional(copy) : std::nullopt)) return false;
        if (asked.work == SegmentWork::COPY) {
            const uint64_t list = index * PIECE_LIST_BYTES;
            std::ranges::copy(std::as_bytes(std::span(pieces)), piece_lists.data() + list);  // perhaps none
            const auto count = static_cast<uint32_t>(pieces.size());
            kernels.launch(copy.way, piece_lists.address() + list, count, segment, mine.stream);
        } else {
            passes.launch(index, kernels, tables.get(), mine.stream);
        }
        mine.event.record(mine.stream);
        return true;
    }

    // Lists the pieces that are only copied, or those that are summed. copy: as in DigestPasses::add().
    bool expand_list(const RingOwner::Asked& asked, const Ring& from, uint32_t index,
                     const std::optional<PassCopy>& copy) {
        pieces.clear();
        passes.begin(index);
        try {
            for (const StagedStretch& stretch : unpack_stretches(asked.list, from.layout, segment_bytes)) {
                const auto& [shard, offset, begin, end] = stretch;
                const size_t first = pieces.size();
                if (!expand(from.layout, shard, begin, end, offset, from.bases, pieces)) return false;
                if (asked.work == SegmentWork::COPY) continue;
                if (end > DIGEST_PAYLOAD_BYTES_MAX) return false;
                passes.begin_sum(index);
                if (!passes.add(index, stretch, std::span(pieces).subspan(first), copy)) return false;
            }
        } catch (const Refusal&) {
            return false;
        }
        return true;
    }

    // Reports the segments whose kernels have ended. True while others run.
    bool look_after(bool& moved) {
        bool running = false;
        for (uint32_t index = 0; index < LANES * SEGMENTS; ++index) {
            if (slots[index].number == 0) continue;
            uint32_t fault = 0;
            try {
                if (!slots[index].event.done()) {
                    running = true;
                    continue;
                }
            } catch (const DriverError& error) {
                set_broken(error.what());
                fault = FAULT_DRIVER;
            }
            end(index / SEGMENTS, index % SEGMENTS, fault);
            moved = true;
        }
        return running;
    }

    void end(uint32_t lane, uint32_t segment, uint32_t fault) {
        Slot& mine = slot(lane, segment);
        if (fault == 0) {
            const bool summed = mine.work != SegmentWork::COPY;
            const std::vector<DigestSum> sums =
                summed ? passes.sums(lane * SEGMENTS + segment) : std::vector<DigestSum>();
            mine.ring->owner.done(lane, segment, mine.sequence, sums);
        } else {
            mine.ring->owner.fault(lane, segment, mine.sequence, fault);
        }
        mine.ring.reset();
        const std::lock_guard lock(mutex);
        mine.number = 0;
        if (!ring && idle()) signal_eventfd(event.get());
    }

    // Sleeps until something may have changed. False: closing.
    bool sleep() {
        std::shared_ptr<Ring> here;
        {
            std::unique_lock lock(mutex);
            changed.wait(lock, [this] { return closing || ring; });
            if (closing) return false;
            here = ring;
        }
        here->owner.sleep(SLEEP_MS);
        return true;
    }

    // ------------------------------------------------------------ any thread

    Slot& slot(uint32_t lane, uint32_t segment) { return slots[lane * SEGMENTS + segment]; }

    bool idle() const {
        for (const Slot& slot : slots) {
            if (slot.number != 0) return false;
        }
        return true;
    }

    void set_broken(const std::string& why) {
        const std::lock_guard lock(mutex);
        if (broken.empty()) broken = why;
        signal_eventfd(event.get());
    }

    // Replaces the ring, or closes, and wakes the thread wherever it sleeps.
    void change(std::shared_ptr<Ring> next, bool close) {
        std::shared_ptr<Ring> before;
        {
            const std::lock_guard lock(mutex);
            before = std::exchange(ring, std::move(next));
            closing = closing || close;
            if (!ring && idle()) signal_eventfd(event.get());
        }
        changed.notify_one();
        if (before) before->owner.ring_bell();
    }

    const Driver& driver;
    const int ordinal;
    const pid_t owner = ::getpid();
    const DeviceMemory staging;
    const uint64_t segment_bytes;
    const IpcHandle handle;
    const Kernels kernels;
    const PinnedMemory piece_lists;  // one list for each segment
    DigestMemory tables;
    DigestPasses passes;
    Descriptor event;

    std::vector<Slot> slots;
    std::vector<Piece> pieces;

    mutable std::mutex mutex;
    std::condition_variable changed;
    std::shared_ptr<Ring> ring;
    std::array<uint64_t, LANES> taken = {};
    std::string broken;
    bool closing = false;
    std::thread thread;
};

StagedCopier::StagedCopier(const Driver& driver, const CopierOptions& options) {
    const Current current(driver, options.ordinal);
    work_ = std::make_unique<Work>(driver, options);
    work_->thread = start_thread("kv-staged", [work = work_.get()] { work->run(); });
}

StagedCopier::~StagedCopier() {
    if (work_->owner != ::getpid()) {
        [[maybe_unused]] Work* parents = work_.release();
        return;
    }
    work_->change(nullptr, /*close=*/true);
    work_->thread.join();
    try {
        const Current current(work_->driver, work_->ordinal);
        work_.reset();
    } catch (const DriverError&) {
        // The driver has shut down before us, as at the end of a process, and has freed everything.
        [[maybe_unused]] Work* nothing = work_.release();
    }
}

IpcHandle StagedCopier::handle() const { return work_->handle; }

uint64_t StagedCopier::segment_bytes() const { return work_->segment_bytes; }

const KernelReport& StagedCopier::kernels() const { return work_->kernels.report(); }

int StagedCopier::begin_ring(Layout layout, std::vector<Address> bases) {
    if (!quiet()) bad_argument("a ring begins when the one before it has ended and is quiet");
    for (const Group& group : layout.groups()) {
        if (work_->tables.reaches(group.shard_bytes)) continue;
        bad_argument(format("shards of %" PRIu64 " bytes are longer than the copier was made for", group.shard_bytes));
    }
    auto next = std::make_shared<Ring>(work_->segment_bytes, std::move(layout), std::move(bases));
    const int fd = next->owner.fd();
    work_->change(std::move(next), /*close=*/false);
    return fd;
}

void StagedCopier::end_ring() { work_->change(nullptr, /*close=*/false); }

bool StagedCopier::quiet() const {
    const std::lock_guard lock(work_->mutex);
    return !work_->ring && work_->idle();
}

uint64_t StagedCopier::mark(uint32_t lane) const {
    const std::lock_guard lock(work_->mutex);
    return work_->taken[lane];
}

bool StagedCopier::passed(uint32_t lane, uint64_t mark) const {
    const std::lock_guard lock(work_->mutex);
    for (uint32_t segment = 0; segment < SEGMENTS; ++segment) {
        const uint64_t number = work_->slot(lane, segment).number;
        if (number != 0 && number <= mark) return false;
    }
    return true;
}

int StagedCopier::eventfd() const { return work_->event.get(); }

std::string StagedCopier::broken() const {
    const std::lock_guard lock(work_->mutex);
    return work_->broken;
}

}  // namespace kv::gpu
