// Memory of another process: a handle names a descriptor of its owner, which /proc opens.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "sim.h"

namespace sim {
namespace {

constexpr uint32_t HANDLE_MAGIC = 0x4e444c48;

struct Handle {
    uint32_t magic;
    uint32_t shown_pid;  // as its container numbers it: KVSIM_PID
    Process owner;
    uint64_t allocation;
    uint64_t
        offset;  // of the pointer that it was made from; HIP's handles differ in it and open at the base all the same
    int32_t fd;
    uint32_t device;
    uint32_t legacy;  // HIP: the mode of the process that made it
    uint32_t reserved[3];
};
static_assert(sizeof(Handle) == sizeof(IpcHandle));

uint32_t shown_pid() {
    const char* told = std::getenv("KVSIM_PID");
    return told ? static_cast<uint32_t>(std::atoi(told)) : static_cast<uint32_t>(getpid());
}

bool legacy_mode() {
    const char* told = std::getenv("HSA_ENABLE_IPC_MODE_LEGACY");
    return HIP && told && std::strcmp(told, "1") == 0;
}

// The entry of an allocation that its owner still has; null else. Under StateLock.
Allocation* living(uint64_t id) {
    for (Allocation& entry : state().allocations) {
        if (entry.id == id && id != 0 && lives(entry.owner)) return &entry;
    }
    return nullptr;
}

bool is_me(const Process& process) { return process.pid == myself().pid && process.started == myself().started; }

bool count_importer(Allocation& entry) {
    for (Process& importer : entry.importers) {
        if (lives(importer)) continue;
        importer = myself();
        return true;
    }
    return false;
}

int map(Address* memory, const Handle& handle, const Allocation& entry) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%u/fd/%d", handle.owner.pid, handle.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_VALUE;
    void* host = mmap(nullptr, entry.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (host == MAP_FAILED) return OUT_OF_MEMORY;
    *memory = tagged(host);
    add({Kind::IMPORT, *memory, entry.bytes, static_cast<std::byte*>(host), static_cast<int>(entry.device), entry.id,
         -1, 1});
    return SUCCESS;
}

}  // namespace

int ipc_get(IpcHandle* handle, Address memory) {
    const std::shared_lock lock(table_lock());
    const Region* region = region_of(memory);
    if (!region || region->kind != Kind::DEVICE) return INVALID_VALUE;
    const StateLock entries;
    const Allocation* entry = living(region->allocation);
    if (!entry || !entry->exportable) return INVALID_VALUE;
    const Handle made{.magic = HANDLE_MAGIC,
                      .shown_pid = shown_pid(),
                      .owner = myself(),
                      .allocation = entry->id,
                      .offset = memory - region->base,
                      .fd = region->fd,
                      .device = entry->device,
                      .legacy = legacy_mode(),
                      .reserved = {}};
    std::memcpy(handle, &made, sizeof made);
    return SUCCESS;
}

int ipc_open(Address* memory, const IpcHandle& bytes, unsigned flags) {
    Handle handle;
    std::memcpy(&handle, &bytes, sizeof handle);
    if (flags != kv::gpu::IPC_LAZY_PEER_ACCESS || handle.magic != HANDLE_MAGIC) return INVALID_VALUE;
    if (HIP && handle.legacy != legacy_mode()) return INVALID_VALUE;
    if (is_me(handle.owner) || (HIP && handle.shown_pid == shown_pid())) return INVALID_CONTEXT;
    const std::unique_lock lock(table_lock());
    const StateLock entries;
    Allocation* entry = living(handle.allocation);
    if (!entry) return INVALID_VALUE;
    if (Region* known = import_of(entry->id)) {
        if (HIP) return ALREADY_MAPPED;
        known->opens++;
        *memory = known->base;
        return SUCCESS;
    }
    if (!count_importer(*entry)) return OUT_OF_MEMORY;
    const int code = map(memory, handle, *entry);
    for (Process& importer : entry->importers) {
        if (code != SUCCESS && is_me(importer)) importer = Process{};
    }
    return code;
}

int ipc_close(Address memory) {
    uint64_t allocation;
    {
        const std::unique_lock lock(table_lock());
        const Region* found = region_of(memory);
        Region* region = found && found->base == memory ? import_of(found->allocation) : nullptr;
        if (!region) return INVALID_VALUE;
        if (--region->opens > 0) return SUCCESS;
        allocation = region->allocation;
        munmap(region->host, region->bytes);
        remove(memory);
    }
    const StateLock entries;
    for (Allocation& entry : state().allocations) {
        for (Process& importer : entry.importers) {
            if (entry.id == allocation && is_me(importer)) importer = Process{};
        }
    }
    return SUCCESS;
}

}  // namespace sim
