// One copy job, from its queue to its end. It knows nothing of threads or queues: CopyEngine calls it under its lock,
// except for calls that say otherwise; any number of workers run copy() at once.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/completion_queue.h"
#include "base/shared_memory.h"
#include "copy/board.h"
#include "copy/copy_kernels.h"
#include "copy/layout.h"
#include "copy/plan.h"
#include "copy/shard_sums.h"

namespace kv {

// A registered cache: its layout and its mapped buffers. Jobs share it; the engine unmaps it after the last one.
struct MappedCache {
    uint64_t session;
    Layout layout;
    std::vector<Mapping> buffers;
    uint64_t jobs = 0;
    bool leaving = false;  // unmap_cache was called
};

struct JobOrder {
    uint64_t job;
    JobKind kind;
    uint64_t cache;
    uint32_t word;
    uint64_t generation;
    std::vector<CopyGroup> groups;
    bool digests = false;  // a store tells the sum of each shard, a retrieve compares it with the expected one
};

class CopyJob {
  public:
    CopyJob(JobOrder order, std::shared_ptr<MappedCache> cache, std::shared_ptr<Board> board, const Mapping& arena)
        : order_(std::move(order)), cache_(std::move(cache)), board_(std::move(board)), arena_(arena) {}

    uint64_t id() const { return order_.job; }
    uint64_t cache_id() const { return order_.cache; }
    JobKind kind() const { return order_.kind; }
    MappedCache& cache() { return *cache_; }

    // A stretch of the plan's stream, or some of the rests: a retrieve with digests sums whole shards, also those of
    // which it copies a part.
    struct Piece {
        uint64_t begin;
        uint64_t end;
        bool is_rest;
    };
    struct ShardShare {
        uint32_t shard;
        DigestSum sum;
    };
    // The outcome of a piece: the sums of its bytes, or why the memory was lost; empty when all is well.
    struct Copied {
        std::vector<ShardShare> shares;
        std::string failure;
    };

    enum class Stage { QUEUED, PLANNING, COPYING };
    Stage stage() const { return stage_; }

    // QUEUED → PLANNING: no other worker may begin it now.
    void claim();
    // Takes the word to SUBMITTED and makes the plan; runs without the engine's lock. False when the job ends here.
    bool begin(int workers);
    // PLANNING → COPYING.
    void release();

    bool has_piece() const {
        return stage_ == Stage::COPYING && !stopped_ && (next_ < plan_->bytes() || next_rest_ < rests_.size());
    }
    Piece take_piece();
    // Copies a piece; runs without the engine's lock.
    Copied copy(Piece piece) const;
    // The piece was copied, or failed. A job that failed or was abandoned hands out no more pieces.
    void piece_ended(Piece piece, Copied copied);
    // PLANNING or COPYING: no further piece is begun. The job ends as abandoned, its word as FAILED.
    void stop() { stopped_ = true; }
    bool finished() const { return stage_ == Stage::COPYING && running_ == 0 && !has_piece(); }

    // Sets the word's final state and returns the completion. Exactly once, when finished() or when begin() was false.
    Completion end();
    // The completion of a job that never began.
    Completion cancelled();

  private:
    void list(Piece piece, std::vector<Copy>& copies, std::vector<uint32_t>& shards) const;
    void list_rests(Piece piece, std::vector<Copy>& copies, std::vector<uint32_t>& shards) const;
    std::vector<ShardRest> wanted_rests() const;
    std::string fault_message(const std::byte* fault) const;
    void fail(std::string code, std::string message);
    void judge();

    const JobOrder order_;
    const std::shared_ptr<MappedCache> cache_;
    const std::shared_ptr<Board> board_;
    const Mapping& arena_;

    Stage stage_ = Stage::QUEUED;
    std::optional<Plan> plan_;
    std::optional<ShardSums> sums_;  // with digests
    std::vector<uint64_t> made_;     // the sums of a store
    std::vector<uint32_t> wrong_;    // the shards of a retrieve with another sum
    std::vector<ShardRest> rests_;   // that are summed as well
    size_t next_rest_ = 0;
    Through through_ = Through::CACHE;
    uint64_t piece_bytes_ = 0;
    uint64_t next_ = 0;    // where the next piece begins
    uint64_t copied_ = 0;  // bytes of the pieces that were copied
    int running_ = 0;      // pieces that workers are copying
    bool stopped_ = false;
    Status status_ = Status::DONE;
    std::string code_;
    std::string message_;
    std::chrono::steady_clock::time_point begun_;
};

}  // namespace kv
