// Touches the pages of an arena, slab by slab from the front, in the background.
//
// Touching memory for the first time costs more than copying it (the kernel clears every page), so the server already
// answers while its pool grows. Existing content is kept: after a restart growing is a quick walk.

#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/shared_memory.h"
#include "base/threads.h"

namespace kv {

struct GrowerOptions {
    uint64_t arena_bytes;
    uint64_t slab_bytes;  // divides arena_bytes
    int threads;
    std::vector<int> numa_nodes;  // one: preferred; several: pages interleaved; none: the kernel decides
};

// Thread-safe. Threads run at lower priority, so that serving comes first.
class ArenaGrower {
  public:
    // Maps the arena and starts. std::system_error when the kernel refuses the NUMA nodes: there is no silent fallback.
    ArenaGrower(int fd, const GrowerOptions& options);
    // The destructor stops after the steps under way, joins, unmaps.

    // Readable when slabs_ready() or problem() changed.
    int eventfd() const { return event_.get(); }
    // Slabs [0, slabs_ready) are touched.
    uint64_t slabs_ready() const;
    // Why growth stopped early; empty while all is well.
    std::string problem() const;

  private:
    struct Step {
        uint64_t offset;
        uint64_t bytes;
    };

    void grow();
    bool take_step(Step& step);
    bool enough_memory(uint64_t offset, uint64_t bytes);
    void end_step(const Step& step, int error);
    std::string refusal(int error) const;
    void stop(std::string problem);

    const GrowerOptions options_;
    Descriptor file_;
    Mapping arena_;
    Descriptor event_;
    bool is_reserved_ = false;

    mutable std::mutex mutex_;  // guards everything below
    bool stopping_ = false;
    uint64_t next_ = 0;                   // offset of the next step
    std::vector<uint64_t> slab_missing_;  // bytes that are not touched yet
    uint64_t slabs_ready_ = 0;
    std::string problem_;

    Threads threads_;
};

}  // namespace kv
