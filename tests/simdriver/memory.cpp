// Which addresses there are in this process, and what lies behind them.

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <random>

#include "sim.h"

namespace sim {
namespace {

constexpr Address TAG = 1ull << 62;               // no host address has this bit
constexpr Address REGISTERED_SPACE = 1ull << 61;  // HIP: where registered memory appears
constexpr uint64_t GRANULE_BYTES = 2 << 20;
constexpr uint64_t PAGE_BYTES = 4096;

std::map<Address, Region>& regions() {
    static auto* table = new std::map<Address, Region>;  // outlives the threads of streams
    return *table;
}

bool on_host(Kind kind) { return kind == Kind::PINNED || kind == Kind::REGISTERED; }

Region* find(Address address) {
    auto after = regions().upper_bound(address);
    if (after == regions().begin()) return nullptr;
    Region& region = std::prev(after)->second;
    return address - region.base < region.bytes ? &region : nullptr;
}

Region* find_host(const void* host) {
    const auto* wanted = static_cast<const std::byte*>(host);
    for (auto& [base, region] : regions()) {
        if (on_host(region.kind) && wanted >= region.host && wanted < region.host + region.bytes) return &region;
    }
    return nullptr;
}

uint64_t pages(uint64_t bytes) { return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

// CUDA: the host's address with the tag. HIP: somewhere else for every registration, and never side by side.
Address registered_address(const void* host, uint64_t bytes) {
    if (!HIP) return tagged(host);
    static Address next = REGISTERED_SPACE;
    static std::minstd_rand random{std::random_device{}()};
    next += (1 + random() % 1000) * GRANULE_BYTES;
    const Address address = next + reinterpret_cast<Address>(host) % PAGE_BYTES;
    next += (bytes + 2 * GRANULE_BYTES) / GRANULE_BYTES * GRANULE_BYTES;
    return address;
}

Allocation* reserve(uint64_t bytes, unsigned device, bool exportable) {
    const StateLock lock;
    const uint64_t total = state().devices[device].total_bytes;
    if (const uint64_t used = used_bytes(device); bytes > total || used > total - bytes) return nullptr;
    for (Allocation& entry : state().allocations) {
        bool in_use = entry.id != 0 && lives(entry.owner);
        for (const Process& importer : entry.importers) in_use = in_use || lives(importer);
        if (in_use) continue;
        entry = Allocation{.id = ++state().header.next_allocation,
                           .bytes = bytes,
                           .device = device,
                           .exportable = exportable,
                           .owner = myself(),
                           .importers = {}};
        return &entry;
    }
    return nullptr;
}

}  // namespace

std::shared_mutex& table_lock() {
    static auto* lock = new std::shared_mutex;
    return *lock;
}

Address tagged(const void* host) { return reinterpret_cast<Address>(host) | TAG; }

std::byte* at(Address address, uint64_t bytes, int device) {
    const Region* region = find(address);
    if (!region || bytes > region->bytes - (address - region->base)) return nullptr;
    if (!on_host(region->kind) && device >= 0 && region->device != device) return nullptr;
    return region->host + (address - region->base);
}

std::byte* pinned_at(const void* host, uint64_t bytes) {
    const Region* region = find_host(host);
    if (!region) return nullptr;
    const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(host) - region->host);
    return bytes <= region->bytes - offset ? region->host + offset : nullptr;
}

const Region* region_of(Address address) { return find(address); }

Region* import_of(uint64_t allocation) {
    for (auto& [base, region] : regions()) {
        if (region.kind == Kind::IMPORT && region.allocation == allocation) return &region;
    }
    return nullptr;
}

void add(const Region& region) { regions().emplace(region.base, region); }

void remove(Address base) { regions().erase(base); }

int allocate(Address* memory, size_t bytes, bool exportable) {
    if (bytes == 0) return INVALID_VALUE;
    const int device = current_device();
    Allocation* entry = reserve(bytes, static_cast<unsigned>(device), exportable);
    if (!entry) return OUT_OF_MEMORY;
    const int fd = memfd_create("kvsim-device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(pages(bytes))) != 0) return OUT_OF_MEMORY;
    void* host = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (host == MAP_FAILED) return OUT_OF_MEMORY;
    *memory = tagged(host);
    const std::unique_lock lock(table_lock());
    add({Kind::DEVICE, *memory, bytes, static_cast<std::byte*>(host), device, entry->id, fd, 0});
    return SUCCESS;
}

int release(Address memory) {
    Region region;
    {
        const std::unique_lock lock(table_lock());
        const Region* found = find(memory);
        if (!found || found->kind != Kind::DEVICE || found->base != memory) return INVALID_VALUE;
        region = *found;
        remove(memory);
        munmap(region.host, pages(region.bytes));
        close(region.fd);
    }
    const StateLock lock;
    for (Allocation& entry : state().allocations) {
        if (entry.id == region.allocation) entry.owner = Process{};
    }
    return SUCCESS;
}

int host_allocate(void** memory, size_t bytes) {
    if (bytes == 0) return INVALID_VALUE;
    *memory = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (*memory == MAP_FAILED) return OUT_OF_MEMORY;
    const std::unique_lock lock(table_lock());
    add({Kind::PINNED, tagged(*memory), bytes, static_cast<std::byte*>(*memory), -1, 0, -1, 0});
    return SUCCESS;
}

int host_release(void* memory) {
    const std::unique_lock lock(table_lock());
    const Region* region = find_host(memory);
    if (!region || region->kind != Kind::PINNED || region->host != memory) return INVALID_VALUE;
    const uint64_t bytes = region->bytes;
    remove(region->base);
    munmap(memory, pages(bytes));
    return SUCCESS;
}

int host_register(void* memory, size_t bytes, unsigned flags) {
    const unsigned known = kv::gpu::HOST_PORTABLE | kv::gpu::HOST_MAPPED;
    if (!memory || bytes == 0 || (flags & ~known) != 0) return INVALID_VALUE;
    const std::unique_lock lock(table_lock());
    const auto* last = static_cast<const std::byte*>(memory) + bytes - 1;
    if (find_host(memory) || find_host(last)) return ALREADY_REGISTERED;
    add({Kind::REGISTERED, registered_address(memory, bytes), bytes, static_cast<std::byte*>(memory), -1, 0, -1, 0});
    return SUCCESS;
}

int host_unregister(void* memory) {
    const std::unique_lock lock(table_lock());
    const Region* region = find_host(memory);
    if (!region || region->kind != Kind::REGISTERED || region->host != memory) return NOT_REGISTERED;
    remove(region->base);
    return SUCCESS;
}

int host_device_pointer(Address* device, void* memory) {
    const std::shared_lock lock(table_lock());
    const Region* region = find_host(memory);
    if (!region) return INVALID_VALUE;
    *device = region->base + static_cast<uint64_t>(static_cast<std::byte*>(memory) - region->host);
    return SUCCESS;
}

int address_range(Address* base, size_t* bytes, Address memory) {
    const std::shared_lock lock(table_lock());
    const Region* region = find(memory);
    if (!region) return HIP ? INVALID_VALUE : NOT_FOUND;
    if (base) *base = region->base;
    if (bytes) *bytes = region->bytes;
    return SUCCESS;
}

int pointer_attribute(void* value, int attribute, Address memory) {
    const std::shared_lock lock(table_lock());
    const Region* region = find(memory);
    if (!region || on_host(region->kind)) return INVALID_VALUE;
    if (attribute == kv::gpu::POINTER_DEVICE_ORDINAL) {
        *static_cast<int*>(value) = ordinal_of_device(region->device);
        return SUCCESS;
    }
    if (attribute != kv::gpu::POINTER_IPC_CAPABLE || HIP) return INVALID_VALUE;
    bool exportable = region->kind == Kind::DEVICE;
    const StateLock entries;
    for (const Allocation& entry : state().allocations) {
        if (entry.id == region->allocation && !entry.exportable) exportable = false;
    }
    *static_cast<int*>(value) = exportable;
    return SUCCESS;
}

}  // namespace sim
