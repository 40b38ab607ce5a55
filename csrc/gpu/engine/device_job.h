// One job on a device, from its queue to its end. It knows nothing of threads: the pump of its direction calls it.
// Any thread may use stop() and the constants.
//
// With digests it sums every shard in the engine's memory (docs/gpu.md): packed jobs with each segment, direct jobs in
// passes of their own. A pass of a retrieve begins when its bytes have landed.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/completion_queue.h"
#include "copy/board.h"
#include "copy/copy_job.h"
#include "copy/layout.h"
#include "copy/plan.h"
#include "copy/shard_sums.h"
#include "gpu/engine/link.h"
#include "gpu/engine/measure.h"
#include "gpu/engine/packer.h"
#include "gpu/engine/shards.h"
#include "gpu/staging/ring.h"

namespace kv::gpu {

enum class JobMode { DIRECT, STAGED, SERVER_GATHER };

inline const char* name_of(JobMode mode) {
    constexpr const char* NAMES[] = {"direct", "staged", "server-gather"};
    return NAMES[static_cast<size_t>(mode)];
}

// A registered cache on the device. Jobs share it; the engine unmaps it after the last one.
struct MappedDeviceCache {
    uint64_t session;
    Layout layout;
    std::vector<IpcHandle> handles = {};  // to be closed by Imports
    std::vector<Address> bases = {};      // of the registered buffers
    std::unique_ptr<RingPeer> ring = {};  // null: the client has no staging
    std::unique_ptr<Packer> gatherer = {}, scatterer = {};
};

// The mover's means of copying, the same for all jobs of a direction.
struct DeviceTools {
    Link& link;
    Packer& packer;  // with our kernels
    const Mapping& arena;
    DirectFrom direct_from;  // compared with the mean length of a job's copies
};

class DeviceJob {
  public:
    // `tools` and the objects that they refer to must outlive the job.
    DeviceJob(JobOrder order, JobMode allowed, std::shared_ptr<MappedDeviceCache> cache, std::shared_ptr<Board> board,
              const DeviceTools& tools);

    uint64_t id() const { return order_.job; }
    uint64_t cache_id() const { return order_.cache; }
    JobKind kind() const { return order_.kind; }

    // Any thread: parts of the job that have not begun are skipped.
    void stop() { stopped_ = true; }
    bool stopped() const { return stopped_; }

    // Takes the word to SUBMITTED, plans, and chooses the mode. False: the job ends here. DriverError as below.
    bool begin();
    // Identity of the segments that it uses: jobs with the same ones take segments one job after the other.
    const void* shares() const;
    // Advances every part that can be now; true when any did. `alone`: no other job shares the segments of this one.
    // DriverError: the context is broken.
    bool advance(bool alone);
    // All bytes of the job are on their way.
    bool all_cut() const;
    bool finished() const { return flights_.empty() && (halted_ || (all_cut() && summed())); }
    // A DMA or one of our kernels is under way: poll again soon.
    bool copying() const;
    // Sets the word's final state. Exactly once, after begin() was false or when finished().
    Completion end();

  private:
    // A segment, or a stretch of a direct job, on its way.
    struct Flight {
        enum class Stage { PACKING, LINKING };
        Stage stage;
        uint32_t segment = 0;                 // of the packer
        std::vector<SegmentPart> parts = {};  // empty: a stretch of a direct job
        SegmentWork work = SegmentWork::COPY;
        std::unique_ptr<LinkTask> task = {};
        uint64_t begin = 0;  // of a stretch, in the stream of plan_
        uint64_t bytes = 0;  // that arrive with it

        bool is_stretch() const { return parts.empty(); }
    };

    // The result of polling a flight.
    enum class Look { WAITS, MOVED, LANDED, GONE };

    bool reached();
    void begin_sums();
    void choose_mode();
    bool choose_direct(uint64_t mean);
    Way way() const { return order_.kind == JobKind::STORE ? Way::TO_HOST : Way::TO_DEVICE; }
    void halt(Status status, const std::string& code = {}, const std::string& message = {});
    bool launch(bool alone);
    bool launch_stretch();
    bool launch_segment(bool alone);
    bool launch_pass();
    bool cut_pass();
    uint64_t landed_before() const;
    bool add_rest();
    Look look_at(Flight& flight);
    Look look_at_packing(Flight& flight);
    Look look_at_linking(Flight& flight);
    void pack(Flight& flight);
    void link(Flight& flight, const Event* after);
    SegmentWork work_of(const std::vector<SegmentPart>& parts) const;
    void collect(const Flight& flight);
    uint64_t left_out(const SegmentPart& part) const;
    bool summed() const { return !sums_ || (cutter_->finished() && pass_.empty() && next_rest_ == rests_.size()); }
    void judge(Completion& completion);

    const JobOrder order_;
    const JobMode allowed_;
    const std::shared_ptr<MappedDeviceCache> cache_;
    const std::shared_ptr<Board> board_;
    const DeviceTools& tools_;

    std::atomic<bool> stopped_{false};
    bool submitted_ = false;  // the word is ours, from SUBMITTED to its end
    bool begun_ = false;      // begin() returned true
    bool halted_ = false;     // nothing more is begun
    bool reached_ = false;    // the link reaches all its slots
    JobMode mode_ = JobMode::DIRECT;
    std::optional<ShardPlan> shards_;
    std::optional<Plan> plan_;  // of a direct job
    uint64_t next_ = 0;         // where the next stretch of plan_ begins
    uint64_t stretch_bytes_ = 0;
    std::optional<Cutter> cutter_;   // of the others, and of a direct job's sums
    std::vector<SegmentPart> pass_;  // of a direct job: what is summed next
    uint64_t pass_end_ = 0;          // the end of its bytes in the stream of plan_
    Packer* packer_ = nullptr;
    std::optional<ShardSums> sums_;  // with digests
    std::vector<ShardRest> rests_;   // of a direct job: what lies in the arena alone, to be summed here
    size_t next_rest_ = 0;
    std::deque<Flight> flights_;
    uint64_t landed_bytes_ = 0;
    Status status_ = Status::DONE;
    std::string code_;
    std::string message_;
    std::chrono::steady_clock::time_point begun_at_;
};

}  // namespace kv::gpu
