#include "base/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstdio>

#include "base/check.h"

#ifndef MFD_HUGE_SHIFT
#define MFD_HUGE_SHIFT 26
#endif

namespace kv {
namespace {

constexpr uint64_t STAT_BLOCK_BYTES = 512;             // of st_blocks, on every file system
constexpr uint64_t ATTRIBUTE_DAX = uint64_t{1} << 21;  // STATX_ATTR_DAX, which older headers lack

struct stat status_of(int fd) {
    struct stat status{};
    if (::fstat(fd, &status) != 0) throw_errno(format("fstat of descriptor %d", fd));
    return status;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

Descriptor::~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
}

Descriptor duplicate(int fd, const std::string& what) {
    Descriptor copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) throw_errno("duplicating the descriptor of " + what);
    return copy;
}

Mapping::Mapping(int fd, uint64_t bytes, const std::string& what) : bytes_(bytes) {
    if (bytes == 0) bad_argument(what + ": 0 bytes cannot be mapped");
    void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) throw_errno(format("mmap of %" PRIu64 " bytes for %s", bytes, what.c_str()));
    data_ = static_cast<std::byte*>(address);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

Mapping::~Mapping() { unmap(); }

bool Mapping::contains(const void* address) const {
    const auto* at = static_cast<const std::byte*>(address);
    return at >= data_ && at < data_ + bytes_;
}

void Mapping::prefer_huge_pages() { ::madvise(data_, bytes_, MADV_HUGEPAGE); }

void Mapping::unmap() {
    if (data_ == nullptr) return;
    const int result = ::munmap(data_, bytes_);
    KV_ASSERT(result == 0);
    data_ = nullptr;
    bytes_ = 0;
}

Mapping map_arena(int fd, uint64_t arena_bytes) {
    const uint64_t present = is_device(fd) ? arena_bytes : file_bytes(fd);
    if (arena_bytes == 0 || arena_bytes > present) {
        bad_argument(format("arena_bytes=%" PRIu64 " must be in (0, file=%" PRIu64 "]", arena_bytes, present));
    }
    Mapping arena(fd, arena_bytes, "the arena");
    arena.prefer_huge_pages();
    return arena;
}

Descriptor create_memfd(const std::string& name, uint64_t bytes, uint64_t huge_page_bytes, bool sealed) {
    if (bytes == 0) bad_argument("a memfd needs at least 1 byte");
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    if (huge_page_bytes != 0) {
        if (!std::has_single_bit(huge_page_bytes) || bytes % huge_page_bytes != 0) {
            bad_argument(format("bytes=%" PRIu64 " must be a multiple of huge_page_bytes=%" PRIu64 ", a power of two",
                                bytes, huge_page_bytes));
        }
        flags |= MFD_HUGETLB | static_cast<unsigned>(std::countr_zero(huge_page_bytes)) << MFD_HUGE_SHIFT;
    }
    Descriptor memfd(::memfd_create(name.c_str(), flags));
    if (memfd.get() < 0) throw_errno("memfd_create " + name);
    if (::ftruncate(memfd.get(), static_cast<off_t>(bytes)) != 0) {
        throw_errno(format("ftruncate of memfd %s to %" PRIu64 " bytes", name.c_str(), bytes));
    }
    if (sealed && ::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw_errno("sealing memfd " + name);
    }
    return memfd;
}

uint64_t free_huge_pages(uint64_t huge_page_bytes) {
    const std::string directory = format("/sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB/", huge_page_bytes / 1024);
    uint64_t counts[2] = {0, 0};
    const char* names[2] = {"free_hugepages", "resv_hugepages"};
    for (int i = 0; i < 2; ++i) {
        FILE* file = std::fopen((directory + names[i]).c_str(), "re");
        if (file == nullptr) return 0;  // the kernel has no huge pages of this size
        const int fields = std::fscanf(file, "%" SCNu64, &counts[i]);
        std::fclose(file);
        if (fields != 1) return 0;
    }
    return counts[0] > counts[1] ? counts[0] - counts[1] : 0;  // free and not reserved for a mapping
}

uint64_t file_bytes(int fd) { return static_cast<uint64_t>(status_of(fd).st_size); }

int file_seals(int fd) { return ::fcntl(fd, F_GET_SEALS); }

bool on_huge_pages(int fd) {
    struct statfs status{};
    if (::fstatfs(fd, &status) != 0) throw_errno(format("fstatfs of descriptor %d", fd));
    return status.f_type == HUGETLBFS_MAGIC;
}

bool is_device(int fd) { return S_ISCHR(status_of(fd).st_mode); }

bool is_reserved(int fd, uint64_t bytes) {
    const struct stat status = status_of(fd);
    const uint64_t allocated = static_cast<uint64_t>(status.st_blocks) * STAT_BLOCK_BYTES;
    return S_ISCHR(status.st_mode) || on_huge_pages(fd) || allocated >= bytes;
}

bool is_dax(int fd) {
    struct statx status{};
    if (::statx(fd, "", AT_EMPTY_PATH, 0, &status) != 0) throw_errno(format("statx of descriptor %d", fd));
    return (status.stx_attributes & ATTRIBUTE_DAX) != 0;
}

Descriptor create_eventfd() {
    Descriptor event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (event.get() < 0) throw_errno("eventfd");
    return event;
}

void signal_eventfd(int fd) {
    const uint64_t one = 1;
    // EAGAIN means that the counter is full, so the descriptor is readable already.
    const ssize_t written = ::write(fd, &one, sizeof one);
    KV_ASSERT(written == sizeof one || errno == EAGAIN);
}

}  // namespace kv
