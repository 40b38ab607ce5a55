#include "gpu/engine/device_job.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kv::gpu {
namespace {

// Bytes of one task of a direct job, and the number of tasks under way.
constexpr uint64_t STRETCH_BYTES_MAX = 16 << 20;
constexpr uint64_t STRETCH_COPIES = 4096;
constexpr size_t STRETCHES_MAX = 3;

// Adjacent slots become one copy: a copy engine needs about 2 us between two copies, as long as for 100 KiB.
void append(std::vector<LinkCopy>& copies, const LinkCopy& next) {
    if (!copies.empty()) {
        LinkCopy& last = copies.back();
        if (last.device + last.bytes == next.device && last.arena_offset + last.bytes == next.arena_offset) {
            last.bytes += next.bytes;
            return;
        }
    }
    copies.push_back(next);
}

}  // namespace

DeviceJob::DeviceJob(JobOrder order, JobMode allowed, std::shared_ptr<MappedDeviceCache> cache,
                     std::shared_ptr<Board> board, const DeviceTools& tools)
    : order_(std::move(order)), allowed_(allowed), cache_(std::move(cache)), board_(std::move(board)), tools_(tools) {}

const void* DeviceJob::shares() const {
    if (allowed_ == JobMode::SERVER_GATHER) return &tools_.packer;
    return cache_.get();
}

// ------------------------------------------------------------------ begin

bool DeviceJob::begin() {
    KV_ASSERT(!begun_);
    if (stopped_) {
        status_ = Status::ABANDONED;
        board_->swap(order_.word, order_.generation, WordState::LIVE, WordState::FAILED);
        return false;
    }
    submitted_ = board_->swap(order_.word, order_.generation, WordState::LIVE, WordState::SUBMITTED);
    if (!submitted_) {
        status_ = Status::ABANDONED;
        return false;
    }
    try {
        shards_.emplace(cache_->layout, order_.groups, tools_.arena_bytes, order_.kind);
    } catch (const Refusal& refusal) {
        halt(Status::INVALID, refusal.code, refusal.message);
        return false;
    }
    try {
        choose_mode();
    } catch (const Refusal& refusal) {
        halt(Status::FAILED, refusal.code, refusal.message);
        return false;
    }
    begun_ = true;
    begun_at_ = std::chrono::steady_clock::now();
    return true;
}

void DeviceJob::choose_mode() {
    const uint64_t mean = shards_->mean_copy_bytes();
    const auto& [staged, bare] = tools_.direct_from;
    mode_ = mean >= (allowed_ == JobMode::STAGED ? staged : bare) ? JobMode::DIRECT : allowed_;
    if (mode_ == JobMode::DIRECT) {
        plan_.emplace(cache_->layout, order_.groups, tools_.arena_bytes, order_.kind);
        stretch_bytes_ = std::clamp(mean * STRETCH_COPIES, SLOT_ALIGN, STRETCH_BYTES_MAX);
        return;
    }
    Packer* const clients = (order_.kind == JobKind::STORE ? cache_->gatherer : cache_->scatterer).get();
    packer_ = mode_ == JobMode::STAGED ? clients : &tools_.packer;
    KV_ASSERT(packer_ != nullptr);
    packer_->prepare();
    cutter_.emplace(*shards_, cache_->layout, packer_->limits(), order_.kind);
}

// ------------------------------------------------------------------ advance

bool DeviceJob::advance(bool alone) {
    KV_ASSERT(begun_);
    const bool wanted = !stopped_ && board_->is(order_.word, order_.generation, WordState::SUBMITTED);
    if (!halted_ && !wanted) halt(Status::ABANDONED);
    bool moved = false;
    for (auto flight = flights_.begin(); flight != flights_.end();) {
        const Look look = look_at(*flight);
        moved |= look != Look::WAITS;
        if (look == Look::LANDED) landed_bytes_ += flight->bytes;
        flight = look == Look::LANDED || look == Look::GONE ? flights_.erase(flight) : std::next(flight);
    }
    while (!halted_ && !all_cut() && reached() && launch(alone)) moved = true;
    return moved;
}

void DeviceJob::halt(Status status, const std::string& code, const std::string& message) {
    halted_ = true;
    status_ = status;
    code_ = code;
    message_ = message;
}

bool DeviceJob::all_cut() const { return plan_ ? next_ == plan_->bytes() : cutter_->finished(); }

// Whether the link reaches all slots. Asks for every shard, because the link prepares the missing ones.
bool DeviceJob::reached() {
    if (reached_) return true;
    reached_ = true;
    for (const Shard& shard : shards_->shards()) {
        if (!tools_.link.reaches(shard.arena_offset, shard.bytes)) reached_ = false;
    }
    return reached_;
}

bool DeviceJob::copying() const {
    return std::any_of(flights_.begin(), flights_.end(), [this](const Flight& flight) {
        return flight.stage == Flight::Stage::LINKING || mode_ == JobMode::SERVER_GATHER;
    });
}

bool DeviceJob::launch(bool alone) { return plan_ ? launch_stretch() : launch_segment(alone); }

bool DeviceJob::launch_stretch() {
    if (flights_.size() == STRETCHES_MAX) return false;
    const uint64_t end = std::min(next_ + stretch_bytes_, plan_->bytes());
    std::vector<PageCopy> pages;
    plan_->expand(next_, end, pages);
    std::vector<LinkCopy> copies;
    copies.reserve(pages.size());
    for (const PageCopy& page : pages) {
        copies.push_back({cache_->bases[page.buffer] + page.buffer_offset, page.arena_offset, page.bytes});
    }
    Flight& flight = flights_.emplace_back(Flight{Flight::Stage::LINKING, 0, {}, nullptr, end - next_});
    next_ = end;
    flight.task = tools_.link.begin(way(), std::move(copies), nullptr);
    return true;
}

bool DeviceJob::launch_segment(bool alone) {
    const std::optional<uint32_t> segment = packer_->claim();
    if (!segment) return false;
    Flight& flight = flights_.emplace_back(Flight{Flight::Stage::PACKING, *segment, cutter_->next(alone), nullptr, 0});
    for (const SegmentPart& part : flight.parts) flight.bytes += part.end - part.begin;
    if (order_.kind == JobKind::RETRIEVE) {
        link(flight, nullptr);
        return true;
    }
    pack(flight);
    if (const Event* const packed = packer_->packed(*segment)) link(flight, packed);
    return true;
}

void DeviceJob::pack(Flight& flight) {
    std::vector<StagedStretch> stretches;
    stretches.reserve(flight.parts.size());
    for (const SegmentPart& part : flight.parts) {
        const Shard& shard = shards_->shards()[part.shard];
        stretches.push_back({{shard.group, shard.first_in_chunk, shard.block_ids}, part.staging, part.begin, part.end});
    }
    flight.stage = Flight::Stage::PACKING;
    packer_->begin(flight.segment, order_.job, {cache_->layout, cache_->bases}, stretches);
}

void DeviceJob::link(Flight& flight, const Event* after) {
    const Address segment = packer_->segment_address(flight.segment);
    std::vector<LinkCopy> copies;
    copies.reserve(flight.parts.size());
    for (const SegmentPart& part : flight.parts) {
        const uint64_t arena_offset = shards_->shards()[part.shard].arena_offset + part.begin;
        append(copies, {segment + part.staging, arena_offset, part.end - part.begin});
    }
    flight.stage = Flight::Stage::LINKING;
    flight.task = tools_.link.begin(way(), std::move(copies), after);
}

DeviceJob::Look DeviceJob::look_at(Flight& flight) {
    return flight.stage == Flight::Stage::PACKING ? look_at_packing(flight) : look_at_linking(flight);
}

DeviceJob::Look DeviceJob::look_at_packing(Flight& flight) {
    if (halted_) return packer_->let_go(flight.segment) ? Look::GONE : Look::WAITS;
    switch (packer_->poll(flight.segment)) {
        case PackState::WAITING:
            return Look::WAITS;
        case PackState::FAULT:
            packer_->recycle(flight.segment);
            halt(Status::FAILED, "client-copy", "the client could not copy between its blocks and its staging memory");
            return Look::GONE;
        case PackState::DONE:
            break;
    }
    if (order_.kind == JobKind::RETRIEVE) {
        packer_->recycle(flight.segment);
        return Look::LANDED;
    }
    link(flight, nullptr);
    return Look::MOVED;
}

DeviceJob::Look DeviceJob::look_at_linking(Flight& flight) {
    if (!flight.task->advance()) return Look::WAITS;
    flight.task.reset();
    if (mode_ == JobMode::DIRECT) return Look::LANDED;
    if (order_.kind == JobKind::RETRIEVE && !halted_) {
        pack(flight);
        return Look::MOVED;
    }
    packer_->recycle(flight.segment);
    return order_.kind == JobKind::STORE ? Look::LANDED : Look::GONE;
}

// ------------------------------------------------------------------ end

Completion DeviceJob::end() {
    KV_ASSERT(!begun_ || finished());
    Completion completion{order_.job, status_};
    completion.mode = name_of(mode_);
    if (begun_) {
        using std::chrono::nanoseconds;
        const auto elapsed = std::chrono::steady_clock::now() - begun_at_;
        completion.copy_ns = static_cast<uint64_t>(std::chrono::duration_cast<nanoseconds>(elapsed).count());
        completion.bytes = landed_bytes_;
    }
    if (status_ == Status::DONE) {
        KV_ASSERT(landed_bytes_ == (plan_ ? plan_->bytes() : shards_->bytes()));
        completion.bytes = shards_->page_bytes();
        if (!board_->swap(order_.word, order_.generation, WordState::SUBMITTED, WordState::DONE)) {
            completion.status = Status::ABANDONED;
        }
    } else if (submitted_) {
        // The swap fails if the client has abandoned the word.
        board_->swap(order_.word, order_.generation, WordState::SUBMITTED, WordState::FAILED);
    }
    completion.code = code_;
    completion.message = message_;
    return completion;
}

}  // namespace kv::gpu
