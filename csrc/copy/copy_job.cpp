#include "copy/copy_job.h"

#include <algorithm>
#include <cinttypes>

#include "base/check.h"
#include "base/sigbus.h"

namespace kv {
namespace {

// After a piece a worker may take a retrieve that arrived meanwhile, and a cancelled job ends. Depending on the page
// size, one of both bounds limits a piece to about 0.1 ms; 1 MiB of 1-byte pages would take 80 ms.
constexpr uint64_t PIECE_BYTES_MAX = 1 << 20;
constexpr uint64_t PIECE_PAGES_MAX = 4096;
// Waking another worker costs about as much as copying this.
constexpr uint64_t PIECE_BYTES_MIN = 256 << 10;
// Pieces per worker, so that all workers end at about the same time.
constexpr uint64_t PIECES_PER_WORKER = 4;
// A piece of what is only summed: as long as one that is copied.
constexpr uint64_t REST_BYTES_MAX = 64 << 10;
constexpr uint64_t PIECE_RESTS_MAX = 16;

// The bytes of a smaller job may stay in the cache for their next reader; a larger job would only evict the cache.
constexpr uint64_t PAST_CACHE_BYTES_MIN = 4 << 20;

struct GuardedCopies {
    std::span<const Copy> copies;
    std::span<uint64_t> sums;  // empty: without digests
    Through through;
};

void run_guarded_copies(void* argument) {
    const auto* work = static_cast<const GuardedCopies*>(argument);
    if (work->sums.empty()) {
        run_copies(work->copies, work->through);
    } else {
        run_summed_copies(work->copies, work->sums, work->through);
    }
}

// Adds up the sums of copies by their shards. Copies of one shard may be far from each other.
std::vector<CopyJob::ShardShare> by_shard(std::span<const Copy> copies, std::span<const uint64_t> sums,
                                          std::span<const uint32_t> shards, size_t shards_of_job) {
    thread_local std::vector<uint32_t> places;  // shard -> its place among the shares + 1; 0 between two calls
    places.resize(std::max(places.size(), shards_of_job));
    std::vector<CopyJob::ShardShare> shares;
    for (size_t i = 0; i < copies.size(); ++i) {
        uint32_t& place = places[shards[i]];
        if (place == 0) {
            shares.push_back({shards[i], {}});
            place = static_cast<uint32_t>(shares.size());
        }
        DigestSum& sum = shares[place - 1].sum;
        sum = sum + DigestSum{sums[i], copies[i].bytes};
    }
    for (const auto& share : shares) places[share.shard] = 0;
    return shares;
}

}  // namespace

void CopyJob::claim() {
    KV_ASSERT(stage_ == Stage::QUEUED);
    stage_ = Stage::PLANNING;
}

bool CopyJob::begin(int workers) {
    KV_ASSERT(stage_ == Stage::PLANNING);
    if (!board_->swap(order_.word, order_.generation, WordState::LIVE, WordState::SUBMITTED)) {
        status_ = Status::ABANDONED;
        return false;
    }
    try {
        plan_.emplace(cache_->layout, order_.groups, arena_.bytes(), order_.kind, StreamOrder::NEIGHBOURS,
                      /*by_shard=*/order_.digests);
        if (order_.digests) sums_.emplace(cache_->layout, order_.groups, order_.kind);
    } catch (const Refusal& refusal) {
        status_ = Status::INVALID;
        code_ = refusal.code;
        message_ = refusal.message;
        return false;
    }
    const uint64_t even = plan_->bytes() / (static_cast<uint64_t>(workers) * PIECES_PER_WORKER);
    piece_bytes_ = std::clamp((even + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN, PIECE_BYTES_MIN, PIECE_BYTES_MAX);
    if (sums_) rests_ = wanted_rests();
    through_ = plan_->bytes() < PAST_CACHE_BYTES_MIN ? Through::CACHE : Through::MEMORY;
    begun_ = std::chrono::steady_clock::now();
    return true;
}

void CopyJob::release() {
    KV_ASSERT(stage_ == Stage::PLANNING);
    stage_ = Stage::COPYING;
}

CopyJob::Piece CopyJob::take_piece() {
    KV_ASSERT(has_piece());
    ++running_;
    if (next_ < plan_->bytes()) {
        const Piece piece{next_, plan_->piece_end(next_, piece_bytes_, PIECE_PAGES_MAX), false};
        next_ = piece.end;
        return piece;
    }
    const Piece piece{next_rest_, std::min(next_rest_ + PIECE_RESTS_MAX, rests_.size()), true};
    next_rest_ = piece.end;
    return piece;
}

CopyJob::Copied CopyJob::copy(Piece piece) const {
    thread_local std::vector<Copy> copies;
    thread_local std::vector<uint32_t> shards;
    thread_local std::vector<uint64_t> sums;
    copies.clear();
    shards.clear();
    if (piece.is_rest) {
        list_rests(piece, copies, shards);
    } else {
        list(piece, copies, shards);
    }
    sums.resize(sums_ ? copies.size() : 0);
    GuardedCopies work{copies, sums, through_};
    const auto* fault = static_cast<const std::byte*>(run_guarded(run_guarded_copies, &work));
    if (fault != nullptr) return {{}, fault_message(fault)};
    if (!sums_) return {};
    return {by_shard(copies, sums, shards, sums_->shards()), {}};
}

void CopyJob::list(Piece piece, std::vector<Copy>& copies, std::vector<uint32_t>& shards) const {
    thread_local std::vector<PageCopy> pages;
    plan_->expand(piece.begin, piece.end, pages);
    for (const PageCopy& page : pages) {
        const Mapping& buffer = cache_->buffers[page.buffer];
        KV_ASSERT(page.buffer_offset + page.bytes <= buffer.bytes());
        KV_ASSERT(page.arena_offset + page.bytes <= arena_.bytes());
        std::byte* const in_buffer = buffer.data() + page.buffer_offset;
        std::byte* const in_arena = arena_.data() + page.arena_offset;
        copies.push_back(order_.kind == JobKind::STORE ? Copy{in_buffer, in_arena, page.bytes, page.in_shard}
                                                       : Copy{in_arena, in_buffer, page.bytes, page.in_shard});
        shards.push_back(page.shard);
    }
}

void CopyJob::list_rests(Piece piece, std::vector<Copy>& copies, std::vector<uint32_t>& shards) const {
    for (uint64_t i = piece.begin; i < piece.end; ++i) {
        const ShardRest& rest = rests_[i];
        copies.push_back({arena_.data() + rest.arena_offset, nullptr, rest.bytes, rest.in_shard});
        shards.push_back(rest.shard);
    }
}

// The rests of shards whose sum is compared, in stretches of a bounded length.
std::vector<ShardRest> CopyJob::wanted_rests() const {
    std::vector<ShardRest> rests;
    for (ShardRest rest : plan_->rests()) {
        if (!sums_->wants(rest.shard)) continue;
        for (uint64_t left = rest.bytes; left > 0; left -= rest.bytes) {
            rest.bytes = std::min(left, REST_BYTES_MAX);
            rests.push_back(rest);
            rest.in_shard += rest.bytes;
            rest.arena_offset += rest.bytes;
        }
    }
    return rests;
}

std::string CopyJob::fault_message(const std::byte* fault) const {
    for (size_t i = 0; i < cache_->buffers.size(); ++i) {
        const Mapping& buffer = cache_->buffers[i];
        if (buffer.contains(fault)) {
            return format("pool-shrunk: no memory behind byte %td of buffer %zu, registered with %" PRIu64 " bytes",
                          fault - buffer.data(), i, buffer.bytes());
        }
    }
    if (arena_.contains(fault)) return format("arena-fault: no memory behind byte %td", fault - arena_.data());
    return "fault: a bus error outside of all buffers";
}

void CopyJob::piece_ended(Piece piece, Copied copied) {
    --running_;
    KV_ASSERT(running_ >= 0);
    if (copied.failure.empty()) {
        if (!piece.is_rest) copied_ += piece.end - piece.begin;
        for (const auto& [shard, sum] : copied.shares) sums_->add(shard, sum);
    } else if (status_ != Status::FAILED) {
        const size_t colon = copied.failure.find(": ");
        fail(copied.failure.substr(0, colon), copied.failure.substr(colon + 2));
    }
    const bool abandoned = !board_->is(order_.word, order_.generation, WordState::SUBMITTED);
    if (status_ == Status::FAILED || abandoned) stopped_ = true;
}

void CopyJob::fail(std::string code, std::string message) {
    status_ = Status::FAILED;
    code_ = std::move(code);
    message_ = std::move(message);
}

// Compares the sums of a job whose bytes are all in place.
void CopyJob::judge() {
    if (order_.kind == JobKind::STORE) {
        std::optional<std::vector<uint64_t>> made = sums_->made();
        KV_ASSERT(made);  // each piece was copied once
        made_ = std::move(*made);
    } else {
        wrong_ = sums_->wrong();
        if (!wrong_.empty()) fail("digest", format("%zu chunks have other bytes than were stored", wrong_.size()));
    }
}

Completion CopyJob::end() {
    uint64_t copy_ns = 0;
    if (stage_ == Stage::COPYING) {
        KV_ASSERT(finished());
        copy_ns = static_cast<uint64_t>((std::chrono::steady_clock::now() - begun_) / std::chrono::nanoseconds(1));
    }
    const auto end_word = [this](WordState end) {
        return board_->swap(order_.word, order_.generation, WordState::SUBMITTED, end);
    };
    const bool begun = status_ != Status::ABANDONED;  // otherwise the word was never ours
    KV_ASSERT(status_ != Status::DONE || stopped_ || copied_ == plan_->bytes());
    if (status_ == Status::DONE && !stopped_ && sums_) judge();
    if (status_ == Status::DONE && (stopped_ || !end_word(WordState::DONE))) status_ = Status::ABANDONED;
    if (begun && status_ != Status::DONE) end_word(WordState::FAILED);  // fails if the client has abandoned the word
    Completion completion{order_.job, status_, copied_, copy_ns, std::move(code_), std::move(message_)};
    if (status_ == Status::DONE) completion.sums = std::move(made_);
    completion.wrong = std::move(wrong_);
    return completion;
}

Completion CopyJob::cancelled() {
    KV_ASSERT(stage_ == Stage::QUEUED);
    board_->swap(order_.word, order_.generation, WordState::LIVE, WordState::FAILED);
    return {order_.job, Status::ABANDONED};
}

}  // namespace kv
