#include "gpu/engine/device_job.h"

#include <algorithm>
#include <cinttypes>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/digest.h"

namespace kv::gpu {
namespace {

// Bytes of one task of a direct job, and the number of tasks under way.
constexpr uint64_t STRETCH_BYTES_MAX = 16 << 20;
constexpr uint64_t STRETCH_COPIES = 4096;
constexpr std::ptrdiff_t STRETCHES_UNDER_WAY_MAX = 3;
// The pump's thread sums no more between two looks at all jobs: about 100 us.
constexpr uint64_t REST_BYTES_MAX = 1 << 20;
constexpr int RESTS_MAX = 1024;

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
        shards_.emplace(cache_->layout, order_.groups, tools_.arena.bytes(), order_.kind);
        if (order_.digests) begin_sums();
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

void DeviceJob::begin_sums() {
    for (const Shard& shard : shards_->shards()) {
        if (shard.bytes <= DIGEST_PAYLOAD_BYTES_MAX) continue;
        throw Refusal("sums", format("a shard of %" PRIu64 " bytes is too long for a digest", shard.bytes));
    }
    sums_.emplace(cache_->layout, order_.groups, order_.kind);
}

void DeviceJob::choose_mode() {
    const bool direct = choose_direct(shards_->mean_copy_bytes());
    if (direct && !sums_) return;
    Packer* const clients = (order_.kind == JobKind::STORE ? cache_->gatherer : cache_->scatterer).get();
    packer_ = allowed_ == JobMode::STAGED ? clients : &tools_.packer;
    KV_ASSERT(packer_ != nullptr);
    packer_->prepare(direct ? SegmentWork::SUM : sums_ ? SegmentWork::COPY_AND_SUM : SegmentWork::COPY);
    cutter_.emplace(*shards_, cache_->layout, packer_->limits(), order_.kind);
}

// Plans a direct job; false: it is another one. mean: the length of its copies.
bool DeviceJob::choose_direct(uint64_t mean) {
    const auto& [staged, bare] = tools_.direct_from;
    mode_ = mean >= (allowed_ == JobMode::STAGED ? staged : bare) ? JobMode::DIRECT : allowed_;
    if (mode_ != JobMode::DIRECT) return false;
    plan_.emplace(cache_->layout, order_.groups, tools_.arena.bytes(), order_.kind, StreamOrder::SHARDS);
    stretch_bytes_ = std::clamp(mean * STRETCH_COPIES, SLOT_ALIGN, STRETCH_BYTES_MAX);
    if (!sums_) return true;
    const auto wanted = [this](const ShardRest& rest) { return sums_->wants(rest.shard); };
    std::ranges::copy_if(plan_->rests(), std::back_inserter(rests_), wanted);
    return true;
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
    while (!halted_ && launch_pass()) moved = true;
    if (!halted_ && add_rest()) moved = true;
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
        return flight.stage == Flight::Stage::LINKING || packer_ == &tools_.packer;
    });
}

bool DeviceJob::launch(bool alone) { return plan_ ? launch_stretch() : launch_segment(alone); }

bool DeviceJob::launch_stretch() {
    if (std::ranges::count_if(flights_, &Flight::is_stretch) == STRETCHES_UNDER_WAY_MAX) return false;
    const uint64_t end = std::min(next_ + stretch_bytes_, plan_->bytes());
    std::vector<PageCopy> pages;
    plan_->expand(next_, end, pages);
    std::vector<LinkCopy> copies;
    copies.reserve(pages.size());
    for (const PageCopy& page : pages) {
        copies.push_back({cache_->bases[page.buffer] + page.buffer_offset, page.arena_offset, page.bytes});
    }
    Flight& flight =
        flights_.emplace_back(Flight{.stage = Flight::Stage::LINKING, .begin = next_, .bytes = end - next_});
    next_ = end;
    flight.task = tools_.link.begin(way(), std::move(copies), nullptr);
    return true;
}

bool DeviceJob::launch_segment(bool alone) {
    const std::optional<uint32_t> segment = packer_->claim();
    if (!segment) return false;
    Flight& flight = flights_.emplace_back(
        Flight{.stage = Flight::Stage::PACKING, .segment = *segment, .parts = cutter_->next(alone)});
    for (const SegmentPart& part : flight.parts) flight.bytes += part.end - part.begin;
    flight.work = work_of(flight.parts);
    if (order_.kind == JobKind::RETRIEVE) {
        link(flight, nullptr);
        return true;
    }
    pack(flight);
    if (const Event* const packed = packer_->packed(*segment)) link(flight, packed);
    return true;
}

// Sums a segment's bytes of a direct job in the engine's memory.
bool DeviceJob::launch_pass() {
    if (!plan_ || !sums_ || !reached_ || !cut_pass()) return false;
    if (order_.kind == JobKind::RETRIEVE && landed_before() < pass_end_) return false;
    const std::optional<uint32_t> segment = packer_->claim();
    if (!segment) return false;
    Flight& flight = flights_.emplace_back(Flight{
        .stage = Flight::Stage::PACKING, .segment = *segment, .parts = std::move(pass_), .work = SegmentWork::SUM});
    pass_.clear();
    pack(flight);
    return true;
}

// Cuts the next pass, unless one waits for its bytes. False: all is summed, or being summed.
bool DeviceJob::cut_pass() {
    while (pass_.empty() && !cutter_->finished()) {
        pass_ = cutter_->next(/*alone=*/false);
        for (const SegmentPart& part : pass_) pass_end_ += part.end - part.begin - left_out(part);
        std::erase_if(pass_, [this](const SegmentPart& part) { return !sums_->wants(part.shard); });
    }
    return !pass_.empty();
}

// The stream of a direct job has landed up to here: stretches may end out of order.
uint64_t DeviceJob::landed_before() const {
    const auto first = std::ranges::find_if(flights_, &Flight::is_stretch);
    return first == flights_.end() ? next_ : first->begin;
}

// Sums some bytes of a direct job that are in none of its blocks. True: there may be more.
bool DeviceJob::add_rest() {
    if (next_rest_ == rests_.size() || !reached_) return false;
    uint64_t room = REST_BYTES_MAX;
    for (int count = 0; count < RESTS_MAX && room > 0 && next_rest_ < rests_.size(); ++count) {
        ShardRest& rest = rests_[next_rest_];
        const uint64_t bytes = std::min(rest.bytes, room);
        sums_->add(rest.shard, kv::digest_sum({tools_.arena.data() + rest.arena_offset, bytes}, rest.in_shard));
        rest = {rest.shard, rest.in_shard + bytes, rest.arena_offset + bytes, rest.bytes - bytes};
        room -= bytes;
        if (rest.bytes == 0) ++next_rest_;
    }
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
    packer_->begin(flight.segment, order_.job, flight.work, {cache_->layout, cache_->bases}, stretches);
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
    collect(flight);
    if (order_.kind == JobKind::RETRIEVE || flight.work == SegmentWork::SUM) {
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
    if (order_.kind == JobKind::STORE && flight.work != SegmentWork::COPY &&
        packer_->packed(flight.segment) != nullptr) {
        collect(flight);  // their kernel ended before the link began
    }
    packer_->recycle(flight.segment);
    return order_.kind == JobKind::STORE ? Look::LANDED : Look::GONE;
}

// ------------------------------------------------------------------ sums

SegmentWork DeviceJob::work_of(const std::vector<SegmentPart>& parts) const {
    const auto wanted = [this](const SegmentPart& part) { return sums_->wants(part.shard); };
    return sums_ && std::ranges::any_of(parts, wanted) ? SegmentWork::COPY_AND_SUM : SegmentWork::COPY;
}

// Adds the sums of a segment. A client's may be any numbers: those that no bytes have count as missing.
void DeviceJob::collect(const Flight& flight) {
    if (flight.work == SegmentWork::COPY) return;
    const std::vector<DigestSum> sums = packer_->sums(flight.segment);
    KV_ASSERT(sums.size() == flight.parts.size());
    for (size_t index = 0; index < sums.size(); ++index) {
        const SegmentPart& part = flight.parts[index];
        const uint64_t left = flight.work == SegmentWork::SUM ? left_out(part) : 0;
        const bool possible = sums[index].sum < DIGEST_PRIME && sums[index].bytes == part.end - part.begin - left;
        if (possible) sums_->add(part.shard, sums[index]);
    }
}

// Bytes of a direct job's part that are in none of its blocks.
uint64_t DeviceJob::left_out(const SegmentPart& part) const {
    const auto before = [](const ShardRest& rest, const SegmentPart& wanted) {
        return std::pair(rest.shard, rest.in_shard + rest.bytes) <= std::pair(wanted.shard, wanted.begin);
    };
    const std::vector<ShardRest>& rests = plan_->rests();
    uint64_t bytes = 0;
    for (auto rest = std::lower_bound(rests.begin(), rests.end(), part, before);
         rest != rests.end() && rest->shard == part.shard && rest->in_shard < part.end; ++rest) {
        bytes += std::min(rest->in_shard + rest->bytes, part.end) - std::max(rest->in_shard, part.begin);
    }
    return bytes;
}

void DeviceJob::judge(Completion& completion) {
    const auto fail = [&](const std::string& message) { halt(Status::FAILED, "digest", message); };
    if (order_.kind == JobKind::STORE) {
        std::optional<std::vector<uint64_t>> made = sums_->made();
        if (!made) return fail("a sum of stored bytes is impossible");
        completion.sums = std::move(*made);
        return;
    }
    completion.wrong = sums_->wrong();
    if (completion.wrong.empty()) return;
    fail(format("%zu chunks have other bytes than were stored", completion.wrong.size()));
}

// ------------------------------------------------------------------ end

Completion DeviceJob::end() {
    KV_ASSERT(!begun_ || finished());
    Completion completion{order_.job, status_};
    if (status_ == Status::DONE && sums_) judge(completion);
    completion.status = status_;
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
            completion.sums.clear();
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
