// Shared memory: memfds, their seals, and mappings that unmap themselves.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace kv {

// Alignment of slots: the smallest page, and O_DIRECT's alignment.
constexpr uint64_t SLOT_ALIGN = 4096;

// Owns a file descriptor.
class Descriptor {
  public:
    Descriptor() = default;
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept;
    ~Descriptor();
    int get() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }

  private:
    int fd_ = -1;
};

// Another descriptor of the same file. `what` names it in errors.
Descriptor duplicate(int fd, const std::string& what);

// Owns a shared, writable mapping of the first `bytes` of a file. Does not keep the descriptor.
class Mapping {
  public:
    Mapping() = default;
    // `what` names the mapping in errors. Touches no page: pages appear when they are used or populated.
    Mapping(int fd, uint64_t bytes, const std::string& what);
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping();

    std::byte* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }
    bool contains(const void* address) const;
    // Advises huge pages, which has an effect only if the kernel gives them to shared memory on advice. Only for memory
    // that will be used as a whole: the first touch allocates a whole huge page.
    void prefer_huge_pages();
    void unmap();

  private:
    std::byte* data_ = nullptr;
    uint64_t bytes_ = 0;
};

// Maps a whole arena and advises huge pages. bad_argument when the file is shorter; a device has no size to compare.
Mapping map_arena(int fd, uint64_t arena_bytes);

// Makes a memfd of that size. huge_page_bytes 0: normal pages. sealed: it can neither shrink nor grow, and takes no
// further seals.
Descriptor create_memfd(const std::string& name, uint64_t bytes, uint64_t huge_page_bytes, bool sealed);

// The number of huge pages of that size that are reserved and free.
uint64_t free_huge_pages(uint64_t huge_page_bytes);

uint64_t file_bytes(int fd);

// The file's seals (F_SEAL_*), or -1 when it is not a shared-memory file.
int file_seals(int fd);

// Whether the file is on hugetlbfs, which has no SEEK_HOLE and populates whole huge pages.
bool on_huge_pages(int fd);

// Whether it is a character device, such as device DAX: it has no size, no blocks, and cannot be read or searched.
bool is_device(int fd);

// Whether every byte up to `bytes` is the file's already: on hugetlbfs, a device, or a file without holes.
bool is_reserved(int fd, uint64_t bytes);

// Whether the file's pages are the medium itself (fsdax), with no page cache between.
bool is_dax(int fd);

// An eventfd, non-blocking and close-on-exec.
Descriptor create_eventfd();

// Makes an eventfd readable.
void signal_eventfd(int fd);

}  // namespace kv
