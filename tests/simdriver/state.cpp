#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

constexpr uint64_t GRANULE_BYTES = 2 << 20;  // what a driver takes for an allocation is a multiple of this

State* mapped = nullptr;
std::string mapped_path;
pid_t attached_pid = 0;
int state_fd = -1;
std::mutex attach_lock;
std::mutex& lock_in_process() {
    static auto* lock = new std::mutex;
    return *lock;
}
std::vector<int>& visible() {
    static auto* devices = new std::vector<int>;
    return *devices;
}

// 0 when there is no such process, or only a zombie of it.
uint64_t start_of(uint32_t pid) {
    char path[32];
    std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    char text[1024];
    const ssize_t count = read(fd, text, sizeof text - 1);
    close(fd);
    if (count <= 0) return 0;
    text[count] = 0;
    const char* rest = std::strrchr(text, ')');  // a name may hold blanks and parentheses
    char state = 0;
    unsigned long long started = 0;
    const char* fields = " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
    if (!rest || std::sscanf(rest + 1, fields, &state, &started) != 2) return 0;
    return state == 'Z' || state == 'X' ? 0 : started;
}

void read_visible() {
    visible().clear();
    const char* list = std::getenv("KVSIM_VISIBLE");
    for (int device = 0; !list && device < static_cast<int>(mapped->header.devices); device++) {
        visible().push_back(device);
    }
    for (; list && *list; list += *list == ',') {
        char* end = nullptr;
        visible().push_back(static_cast<int>(std::strtol(list, &end, 10)));
        if (end == list) break;
        list = end;
    }
}

void name_counters() {
    for (unsigned number = 0; number < static_cast<unsigned>(Symbol::COUNT); number++) {
        if (const char* name = name_of(static_cast<Symbol>(number))) {
            std::strncpy(mapped->counters[number].symbol, name, NAME_BYTES - 1);
        }
    }
}

}  // namespace

int attach() {
    const std::lock_guard lock(attach_lock);
    if (mapped && !attached()) return NOT_INITIALIZED;  // a fork: a driver cannot be used in the child
    const char* path = std::getenv("KVSIM_STATE");
    if (!path) return NO_DEVICE;
    if (mapped_path == path) return SUCCESS;
    if (state_fd >= 0) close(state_fd);  // another machine: tests of one process follow each other
    state_fd = open(path, O_RDWR | O_CLOEXEC);
    if (state_fd < 0) return NO_DEVICE;
    void* memory = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (memory == MAP_FAILED) return NO_DEVICE;
    mapped = static_cast<State*>(memory);
    if (mapped->header.magic != MAGIC) return NO_DEVICE;
    read_visible();
    name_counters();
    mapped_path = path;
    attached_pid = getpid();
    return SUCCESS;
}

bool attached() { return attached_pid == getpid(); }

State& state() { return *mapped; }

StateLock::StateLock() {
    lock_in_process().lock();
    while (flock(state_fd, LOCK_EX) != 0) continue;  // EINTR
}

StateLock::~StateLock() {
    flock(state_fd, LOCK_UN);
    lock_in_process().unlock();
}

Process myself() {
    static const Process me{static_cast<uint32_t>(getpid()), 0, start_of(static_cast<uint32_t>(getpid()))};
    return me;
}

bool lives(const Process& process) { return process.pid != 0 && start_of(process.pid) == process.started; }

uint64_t used_bytes(unsigned device) {
    uint64_t used = 0;
    for (const Allocation& allocation : state().allocations) {
        if (allocation.id == 0 || allocation.device != device) continue;
        bool in_use = lives(allocation.owner);
        for (const Process& importer : allocation.importers) in_use = in_use || lives(importer);
        if (in_use) used += (allocation.bytes + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES;
    }
    return used;
}

int ordinals() { return static_cast<int>(visible().size()); }

int device_of_ordinal(int ordinal) {
    return ordinal >= 0 && ordinal < ordinals() ? visible()[static_cast<size_t>(ordinal)] : -1;
}

int ordinal_of_device(int device) {
    for (int ordinal = 0; ordinal < ordinals(); ordinal++) {
        if (device_of_ordinal(ordinal) == device) return ordinal;
    }
    return -1;
}

}  // namespace sim
