#include "arena/grower.h"

#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/prefault.h"
#include "base/words.h"

namespace kv {
namespace {

constexpr int THREADS_MAX = 64;
constexpr uint64_t STEP_BYTES = 16 << 20;

// Left for all other processes. With less, the kernel would not refuse memory but kill a process.
constexpr uint64_t RESERVE_BYTES = 256 << 20;

// Niceness of the threads; serving threads have 0.
constexpr int NICENESS = 10;

// From linux/mempolicy.h: libnuma is not needed for one call.
constexpr int POLICY_PREFERRED = 1;
constexpr int POLICY_INTERLEAVE = 3;
constexpr int NODES_MAX = 1024;

std::string shown(const std::vector<int>& nodes) {
    std::string text;
    for (const int node : nodes) text += (text.empty() ? "" : ",") + std::to_string(node);
    return text;
}

// Sets the NUMA policy. Both policies take memory elsewhere when these nodes have no more.
void place(const Mapping& arena, const std::vector<int>& nodes) {
    constexpr int bits = 8 * sizeof(unsigned long);
    unsigned long mask[NODES_MAX / bits] = {};
    for (const int node : nodes) {
        if (node < 0 || node >= NODES_MAX) bad_argument(format("numa_node=%d must be in [0, %d)", node, NODES_MAX));
        mask[node / bits] |= 1ul << (node % bits);
    }
    const int policy = nodes.size() == 1 ? POLICY_PREFERRED : POLICY_INTERLEAVE;
    // The policy belongs to the shared memory, not to this mapping: it applies to every process that touches a page.
    if (::syscall(SYS_mbind, arena.data(), arena.bytes(), policy, mask, NODES_MAX + 1, 0) != 0) {
        throw_errno("placing the arena on NUMA node " + shown(nodes));
    }
}

// Bytes without a page yet. (SEEK_HOLE would walk to the next hole, however far away that is.)
uint64_t missing_bytes(std::byte* address, uint64_t bytes) {
    const auto page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    unsigned char resident[STEP_BYTES / SLOT_ALIGN];
    uint64_t missing = 0;
    for (uint64_t at = 0; at < bytes; at += STEP_BYTES) {
        const uint64_t here = std::min(STEP_BYTES, bytes - at);
        if (::mincore(address + at, here, resident) != 0) return bytes;  // unknown: as if all were missing
        const uint64_t pages = (here + page_bytes - 1) / page_bytes;
        const auto absent = [](unsigned char page) { return (page & 1) == 0; };
        missing += page_bytes * static_cast<uint64_t>(std::count_if(resident, resident + pages, absent));
    }
    return missing;
}

// The free bytes of the file's file system: a tmpfs has a size, which others may use up. nullopt for a memfd.
std::optional<uint64_t> room_bytes(int fd) {
    struct statvfs status{};
    if (::fstatvfs(fd, &status) != 0 || status.f_blocks == 0) return std::nullopt;
    return uint64_t{status.f_bavail} * status.f_frsize;
}

constexpr uint64_t UNLIMITED = std::numeric_limits<uint64_t>::max();

// The number after `key` in a file of "key value" lines; `otherwise` when there is none.
uint64_t number_in(const std::string& path, std::string_view key, uint64_t otherwise) {
    Words words(content_of(path));
    uint64_t number = 0;
    for (std::string_view word = words.next(); !word.empty(); word = words.next()) {
        if (word == key && words.next(number)) return number;
    }
    return otherwise;
}

// The value of a file with one number, or "max".
uint64_t number_of(const std::string& path, uint64_t otherwise) {
    Words(content_of(path)).next(otherwise);
    return otherwise;
}

// The path of our group in the unified hierarchy: the line "0::PATH".
std::string control_group() {
    const std::string lines = "\n" + content_of("/proc/self/cgroup") + "\n";
    const size_t line = lines.find("\n0::");
    if (line == std::string::npos) return "/";
    const size_t from = line + std::string_view("\n0::").size();
    return lines.substr(from, lines.find('\n', from) - from);
}

uint64_t left_in_group(const std::string& directory) {
    const uint64_t limit = number_of(directory + "/memory.max", UNLIMITED);
    if (limit == UNLIMITED) return UNLIMITED;
    const std::string details = directory + "/memory.stat";
    const uint64_t droppable = number_in(details, "inactive_file", 0) + number_in(details, "active_file", 0);
    const uint64_t used = number_of(directory + "/memory.current", 0);
    const uint64_t held = used - std::min(used, droppable);
    return limit - std::min(limit, held);
}

// The memory that this process may still take: the minimum of the machine's available memory and of what each limit of
// our control groups (version 2) leaves. Page cache that can be dropped counts as available.
uint64_t available_memory_bytes() {
    const uint64_t kilobytes = number_in("/proc/meminfo", "MemAvailable:", UNLIMITED / 1024);
    uint64_t available = kilobytes * 1024;
    // Every ancestor may have a limit. Inside a container the path may name groups that are not visible here; their
    // limits are unknown.
    for (std::string path = control_group();; path.erase(path.rfind('/'))) {
        available = std::min(available, left_in_group("/sys/fs/cgroup" + path));
        if (path.find('/') == std::string::npos) return available;
    }
}

}  // namespace

ArenaGrower::ArenaGrower(int fd, const GrowerOptions& options)
    : options_(options), file_(duplicate(fd, "the arena")), event_(create_eventfd()), threads_([this] {
          const std::lock_guard lock(mutex_);
          stopping_ = true;
      }) {
    const auto& [arena_bytes, slab_bytes, threads, numa_nodes] = options;
    if (slab_bytes == 0 || slab_bytes % SLOT_ALIGN != 0 || arena_bytes == 0 || arena_bytes % slab_bytes != 0) {
        bad_argument(format("arena_bytes=%" PRIu64 " must be a multiple of slab_bytes=%" PRIu64 ", that of %" PRIu64,
                            arena_bytes, slab_bytes, SLOT_ALIGN));
    }
    check_range("threads", threads, 1, THREADS_MAX);
    arena_ = map_arena(fd, arena_bytes);
    if (!numa_nodes.empty()) place(arena_, numa_nodes);
    is_reserved_ = is_reserved(fd, arena_bytes);
    slab_missing_.assign(arena_bytes / slab_bytes, slab_bytes);
    for (int i = 0; i < threads; ++i) threads_.start(format("kv-grow-%d", i), [this] { grow(); });
}

uint64_t ArenaGrower::slabs_ready() const {
    const std::lock_guard lock(mutex_);
    return slabs_ready_;
}

std::string ArenaGrower::problem() const {
    const std::lock_guard lock(mutex_);
    return problem_;
}

void ArenaGrower::grow() {
    lower_priority(NICENESS);
    for (Step step; take_step(step);) end_step(step, populate(arena_.data() + step.offset, step.bytes));
}

bool ArenaGrower::take_step(Step& step) {
    const std::lock_guard lock(mutex_);
    if (stopping_ || next_ == arena_.bytes()) return false;
    step = {next_, std::min(STEP_BYTES, options_.slab_bytes - next_ % options_.slab_bytes)};
    // A slab that cannot be completed is not begun. Later steps check again, since others may take memory meanwhile.
    const bool first = next_ % options_.slab_bytes == 0;
    if (!enough_memory(next_, first ? options_.slab_bytes : step.bytes)) return false;
    next_ += step.bytes;
    return true;
}

// Whether there is memory for the missing pages of that stretch; stops growth if not. What is reserved is ours already.
bool ArenaGrower::enough_memory(uint64_t offset, uint64_t bytes) {
    if (is_reserved_) return true;
    const uint64_t missing = missing_bytes(arena_.data() + offset, bytes);
    if (missing == 0) return true;
    const std::optional<uint64_t> room = room_bytes(file_.get());
    if (room && *room < missing) {
        stop(
            format("%" PRIu64 " MiB more are needed, its file system has %" PRIu64 " MiB", missing >> 20, *room >> 20));
        return false;
    }
    const uint64_t available = available_memory_bytes();
    const uint64_t kept_free = RESERVE_BYTES + static_cast<uint64_t>(options_.threads) * STEP_BYTES;
    if (available >= kept_free && available - kept_free >= missing) return true;
    stop(format("%" PRIu64 " MiB more are needed, %" PRIu64 " MiB of memory are available, and %" PRIu64
                " MiB of them stay free",
                missing >> 20, available >> 20, kept_free >> 20));
    return false;
}

void ArenaGrower::end_step(const Step& step, int error) {
    const std::lock_guard lock(mutex_);
    if (error != 0) {
        stop(refusal(error));
        return;
    }
    uint64_t& missing = slab_missing_[step.offset / options_.slab_bytes];
    KV_ASSERT(missing >= step.bytes);
    missing -= step.bytes;
    const uint64_t before = slabs_ready_;
    while (slabs_ready_ < slab_missing_.size() && slab_missing_[slabs_ready_] == 0) ++slabs_ready_;
    if (slabs_ready_ != before) signal_eventfd(event_.get());
}

// The error for people. A full file system returns EFAULT, since touching the page would be a SIGBUS.
std::string ArenaGrower::refusal(int error) const {
    if (error == EFAULT && !is_device(file_.get()) && room_bytes(file_.get())) return "its file system is full";
    return std::strerror(error);
}

// Stops growth with the first problem; steps that other threads have under way still count.
void ArenaGrower::stop(std::string problem) {
    stopping_ = true;
    if (!problem_.empty()) return;
    problem_ = format("the arena stopped growing at %" PRIu64 " of %" PRIu64 " MiB: %s", next_ >> 20,
                      arena_.bytes() >> 20, problem.c_str());
    signal_eventfd(event_.get());
}

}  // namespace kv
