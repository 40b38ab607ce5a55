#include "base/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>

#include "base/check.h"
#include "base/sigbus.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kv {
namespace {

// A mapping call waits for the step in progress, so a step must be short.
constexpr uint64_t STEP_BYTES = 4 << 20;

struct Pages {
    std::byte* address;
    uint64_t bytes;
};

void add_nothing_to_each(void* argument) {
    const Pages& pages = *static_cast<Pages*>(argument);
    for (uint64_t at = 0; at < pages.bytes; at += SLOT_ALIGN) {
        std::atomic_ref<unsigned char>(*reinterpret_cast<unsigned char*>(pages.address + at)).fetch_add(0);
    }
}

int advise(std::byte* address, uint64_t bytes, int advice) {
    for (;;) {
        if (::madvise(address, bytes, advice) == 0) return 0;
        if (errno == EINVAL) return touch_each_page(address, bytes);
        if (errno != EINTR && errno != EAGAIN) return errno;
    }
}

}  // namespace

int touch_each_page(std::byte* address, uint64_t bytes) {
    install_sigbus_guard();
    Pages pages{address, bytes};
    return run_guarded(add_nothing_to_each, &pages) == nullptr ? 0 : EFAULT;
}

int populate(std::byte* address, uint64_t bytes) { return advise(address, bytes, MADV_POPULATE_WRITE); }

void fault_in(std::byte* address, uint64_t bytes) {
    const int error = advise(address, bytes, MADV_POPULATE_READ);
    if (error == 0) return;
    errno = error;
    throw_errno(format("faulting in %" PRIu64 " bytes", bytes));
}

Prefault::Prefault(int fd, std::byte* data, uint64_t bytes, bool follow)
    : file_(duplicate(fd, "a mapping")), data_(data), bytes_(bytes), follow_(follow) {
    // hugetlbfs and devices cannot list their existing pages; their few faults are left to the copies.
    if (on_huge_pages(fd) || is_device(fd)) position_ = bytes_;
}

Prefault::Step Prefault::step() {
    if (position_ >= bytes_) return Step::FINISHED;
    if (position_ >= extent_end_ && !find_extent()) return follow_ ? Step::WAITING : Step::FINISHED;
    const uint64_t bytes = std::min(STEP_BYTES, extent_end_ - position_);
    // An error only costs speed later: the file may be shrinking, which the copies will notice.
    ::madvise(data_ + position_, bytes, MADV_POPULATE_READ);
    position_ += bytes;
    return Step::PROGRESS;
}

// Moves to the next stretch of existing pages. SEEK_HOLE walks over the whole stretch, so it is called once for each.
bool Prefault::find_extent() {
    const off_t begin = ::lseek(file_.get(), static_cast<off_t>(position_), SEEK_DATA);
    if (begin < 0 || static_cast<uint64_t>(begin) >= bytes_) return false;
    const off_t end = ::lseek(file_.get(), begin, SEEK_HOLE);
    if (end <= begin) return false;
    position_ = static_cast<uint64_t>(begin) / SLOT_ALIGN * SLOT_ALIGN;
    extent_end_ = std::min((static_cast<uint64_t>(end) + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN, bytes_);
    return true;
}

}  // namespace kv
