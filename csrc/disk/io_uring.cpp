// io_uring by its system calls: one kind of request is not worth a dependency on liburing.

#if __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/shared_memory.h"
#include "disk/io.h"

namespace kv::disk {
namespace {

constexpr uint64_t WAKE = 0;  // user_data of the poll on our eventfd; all others are addresses
constexpr unsigned REGISTERED_MAX = 4096;

// Owns a mapping of a part of the ring.
class RingMapping {
  public:
    RingMapping(int ring, size_t bytes, off_t part) : bytes_(bytes) {
        address_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, part);
        if (address_ == MAP_FAILED) throw_errno("mmap of an io_uring");
    }
    RingMapping(const RingMapping&) = delete;
    ~RingMapping() { ::munmap(address_, bytes_); }
    template <typename T>
    T* at(size_t offset) const {
        return reinterpret_cast<T*>(static_cast<std::byte*>(address_) + offset);
    }

  private:
    void* address_;
    size_t bytes_;
};

class UringIo : public Io {
  public:
    UringIo(Files files, Descriptor ring, const io_uring_params& params)
        : files_(files),
          ring_(std::move(ring)),
          queues_(ring_.get(),
                  std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                           params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe)),
                  IORING_OFF_SQ_RING),
          entries_(ring_.get(), params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
          submit_mask_(*queues_.at<uint32_t>(params.sq_off.ring_mask)),
          submit_tail_(*queues_.at<uint32_t>(params.sq_off.tail)),
          submit_array_(queues_.at<uint32_t>(params.sq_off.array)),
          end_mask_(*queues_.at<uint32_t>(params.cq_off.ring_mask)),
          end_head_(*queues_.at<uint32_t>(params.cq_off.head)),
          end_tail_(*queues_.at<uint32_t>(params.cq_off.tail)),
          ends_(queues_.at<io_uring_cqe>(params.cq_off.cqes)),
          event_(create_eventfd()) {
        io_uring_rsrc_register table{};
        table.nr = REGISTERED_MAX;
        table.flags = IORING_RSRC_REGISTER_SPARSE;
        has_table_ = register_with(IORING_REGISTER_BUFFERS2, &table, sizeof table) == 0;
        watch_event();
    }

    // The kernel ends all requests before the ring is gone; callers have collected everything before.
    ~UringIo() override = default;

    void submit(Request& request) override {
        const bool reads = request.direction == Direction::READ;
        const int buffer = buffer_of(request);
        io_uring_sqe& entry = next_entry();
        entry.opcode = static_cast<uint8_t>(buffer < 0 ? (reads ? IORING_OP_READ : IORING_OP_WRITE)
                                                       : (reads ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED));
        entry.buf_index = static_cast<uint16_t>(std::max(buffer, 0));
        entry.fd = files_.of(request.file);
        entry.off = request.offset;
        entry.addr = reinterpret_cast<uint64_t>(request.memory);
        entry.len = request.bytes;
        entry.user_data = reinterpret_cast<uint64_t>(&request);
    }

    void start() override { enter(false); }

    void collect(std::vector<Request*>& ended) override {
        enter(nothing_ended());
        const uint32_t tail = std::atomic_ref(end_tail_).load(std::memory_order_acquire);
        uint32_t head = end_head_;
        for (; head != tail; ++head) {
            const io_uring_cqe& end = ends_[head & end_mask_];
            if (end.user_data == WAKE) {
                uint64_t count;
                const ssize_t taken = ::read(event_.get(), &count, sizeof count);
                KV_ASSERT(taken == sizeof count || errno == EAGAIN);
                watch_event();
            } else {
                auto* const request = reinterpret_cast<Request*>(end.user_data);
                request->result = end.res;
                ended.push_back(request);
            }
        }
        std::atomic_ref(end_head_).store(head, std::memory_order_release);
    }

    void wake() override { signal_eventfd(event_.get()); }

    bool register_memory(std::byte* memory, uint64_t bytes) override {
        if (!has_table_ || registered_.size() == REGISTERED_MAX) return false;
        const iovec piece{memory, bytes};
        io_uring_rsrc_update2 update{};
        update.offset = static_cast<uint32_t>(registered_.size());
        update.data = reinterpret_cast<uint64_t>(&piece);
        update.nr = 1;
        if (register_with(IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) != 1) return false;
        registered_.emplace_back(memory, memory + bytes);
        return true;
    }

    std::string name() const override { return "io_uring"; }

  private:
    long register_with(unsigned what, void* argument, size_t bytes) const {
        return ::syscall(__NR_io_uring_register, ring_.get(), what, argument, bytes);
    }

    // Index of the registered piece that contains the request's memory, or -1. Pieces have ascending addresses.
    int buffer_of(const Request& request) const {
        const auto after = [](const std::byte* memory, const auto& piece) { return memory < piece.first; };
        const auto next = std::upper_bound(registered_.begin(), registered_.end(), request.memory, after);
        if (next == registered_.begin() || request.memory + request.bytes > std::prev(next)->second) return -1;
        return static_cast<int>(std::prev(next) - registered_.begin());
    }

    io_uring_sqe& next_entry() {
        KV_ASSERT(unsubmitted_ <= submit_mask_);  // the ring has an entry for every possible request
        const uint32_t index = (submit_tail_ + unsubmitted_) & submit_mask_;
        ++unsubmitted_;
        submit_array_[index] = index;
        io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
        std::memset(&entry, 0, sizeof entry);
        return entry;
    }

    void watch_event() {
        io_uring_sqe& entry = next_entry();
        entry.opcode = IORING_OP_POLL_ADD;
        entry.fd = event_.get();
        entry.poll32_events = POLLIN;
        entry.user_data = WAKE;
    }

    bool nothing_ended() const { return std::atomic_ref(end_tail_).load(std::memory_order_acquire) == end_head_; }

    void enter(bool wait) {
        std::atomic_ref(submit_tail_).store(submit_tail_ + unsubmitted_, std::memory_order_release);
        do {
            const unsigned flags = wait ? IORING_ENTER_GETEVENTS : 0;
            if (unsubmitted_ == 0 && !wait) return;
            const long taken =
                ::syscall(__NR_io_uring_enter, ring_.get(), unsubmitted_, wait ? 1 : 0, flags, nullptr, 0);
            if (taken >= 0) {
                unsubmitted_ -= static_cast<uint32_t>(taken);
            } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
                throw_errno("io_uring_enter");
            }
        } while (unsubmitted_ > 0 || (wait && nothing_ended()));
    }

    const Files files_;
    const Descriptor ring_;
    const RingMapping queues_;
    const RingMapping entries_;
    const uint32_t submit_mask_;
    uint32_t& submit_tail_;
    uint32_t* const submit_array_;
    const uint32_t end_mask_;
    uint32_t& end_head_;
    uint32_t& end_tail_;
    const io_uring_cqe* const ends_;
    const Descriptor event_;
    uint32_t unsubmitted_ = 0;
    bool has_table_ = false;
    std::vector<std::pair<std::byte*, std::byte*>> registered_;  // [begin, end)
};

// Whether the kernel has the operations that we use. Plain reads and writes came with Linux 5.6.
bool knows_what_we_ask(int ring) {
    constexpr unsigned operations = 256;
    alignas(io_uring_probe) std::byte memory[sizeof(io_uring_probe) + operations * sizeof(io_uring_probe_op)]{};
    auto* const probe = reinterpret_cast<io_uring_probe*>(memory);
    if (::syscall(__NR_io_uring_register, ring, IORING_REGISTER_PROBE, probe, operations) != 0) return false;
    const auto known = [&](unsigned operation) {
        return operation <= probe->last_op && (probe->ops[operation].flags & IO_URING_OP_SUPPORTED) != 0;
    };
    return known(IORING_OP_READ) && known(IORING_OP_WRITE) && known(IORING_OP_READ_FIXED) &&
           known(IORING_OP_WRITE_FIXED) && known(IORING_OP_POLL_ADD);
}

}  // namespace

std::unique_ptr<Io> open_uring(Files files, unsigned requests, std::string& why) {
    io_uring_params params{};
    // Two more for the eventfd's poll, which is submitted again before its last entry was collected.
    const unsigned entries = std::bit_ceil(requests + 2);
    params.flags = IORING_SETUP_COOP_TASKRUN;  // the lane polls for completions and needs no interrupt
    Descriptor ring(static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params)));
    if (ring.get() < 0 && errno == EINVAL) {  // before Linux 5.19
        params = {};
        ring = Descriptor(static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params)));
    }
    if (ring.get() < 0) {
        why = std::strerror(errno);
        return nullptr;
    }
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0 || (params.features & IORING_FEAT_NODROP) == 0 ||
        !knows_what_we_ask(ring.get())) {
        why = "this kernel's is too old";
        return nullptr;
    }
    return std::make_unique<UringIo>(files, std::move(ring), params);
}

}  // namespace kv::disk

#else

#include "disk/io.h"

namespace kv::disk {

std::unique_ptr<Io> open_uring(Files, unsigned, std::string& why) {
    why = "not known where this was built";
    return nullptr;
}

}  // namespace kv::disk

#endif
