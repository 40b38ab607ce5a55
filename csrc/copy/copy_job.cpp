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

// The bytes of a smaller job may stay in the cache for their next reader; a larger job would only evict the cache.
constexpr uint64_t PAST_CACHE_BYTES_MIN = 4 << 20;

struct GuardedCopies {
    std::span<const Copy> copies;
    Through through;
};

void run_guarded_copies(void* argument) {
    const auto* work = static_cast<const GuardedCopies*>(argument);
    run_copies(work->copies, work->through);
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
        plan_.emplace(cache_->layout, order_.groups, arena_.bytes(), order_.kind);
    } catch (const Refusal& refusal) {
        status_ = Status::INVALID;
        code_ = refusal.code;
        message_ = refusal.message;
        return false;
    }
    const uint64_t even = plan_->bytes() / (static_cast<uint64_t>(workers) * PIECES_PER_WORKER);
    piece_bytes_ = std::clamp((even + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN, PIECE_BYTES_MIN, PIECE_BYTES_MAX);
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
    const Piece piece{next_, plan_->piece_end(next_, piece_bytes_, PIECE_PAGES_MAX)};
    next_ = piece.end;
    ++running_;
    return piece;
}

std::string CopyJob::copy(Piece piece) const {
    thread_local std::vector<PageCopy> pages;
    thread_local std::vector<Copy> copies;
    plan_->expand(piece.begin, piece.end, pages);
    copies.clear();
    for (const PageCopy& page : pages) {
        const Mapping& buffer = cache_->buffers[page.buffer];
        KV_ASSERT(page.buffer_offset + page.bytes <= buffer.bytes());
        KV_ASSERT(page.arena_offset + page.bytes <= arena_.bytes());
        std::byte* const in_buffer = buffer.data() + page.buffer_offset;
        std::byte* const in_arena = arena_.data() + page.arena_offset;
        copies.push_back(order_.kind == JobKind::STORE ? Copy{in_buffer, in_arena, page.bytes}
                                                       : Copy{in_arena, in_buffer, page.bytes});
    }
    GuardedCopies work{copies, through_};
    const auto* fault = static_cast<const std::byte*>(run_guarded(run_guarded_copies, &work));
    if (fault == nullptr) return {};
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

void CopyJob::piece_ended(Piece piece, std::string failure) {
    --running_;
    KV_ASSERT(running_ >= 0);
    if (failure.empty()) {
        copied_ += piece.end - piece.begin;
    } else if (status_ != Status::FAILED) {
        status_ = Status::FAILED;
        const size_t colon = failure.find(": ");
        code_ = failure.substr(0, colon);
        message_ = failure.substr(colon + 2);
    }
    const bool abandoned = !board_->is(order_.word, order_.generation, WordState::SUBMITTED);
    if (status_ == Status::FAILED || abandoned) stopped_ = true;
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
    if (status_ == Status::DONE && (stopped_ || !end_word(WordState::DONE))) status_ = Status::ABANDONED;
    if (begun && status_ != Status::DONE) end_word(WordState::FAILED);  // fails if the client has abandoned the word
    return {order_.job, status_, copied_, copy_ns, std::move(code_), std::move(message_)};
}

Completion CopyJob::cancelled() {
    KV_ASSERT(stage_ == Stage::QUEUED);
    board_->swap(order_.word, order_.generation, WordState::LIVE, WordState::FAILED);
    return {order_.job, Status::ABANDONED};
}

}  // namespace kv
