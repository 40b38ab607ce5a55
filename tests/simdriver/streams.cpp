// Streams and events: a stream is a thread that carries out operations in order; what they touch is checked then.

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

constexpr uint64_t COPY_STEP_BYTES = 256 << 10;  // between two looks at the throttle
constexpr size_t HIP_BATCH_MAX = 8192;

using Operation = std::function<int()>;

struct Stream {
    const int device;
    std::mutex lock{};
    std::condition_variable changed{};
    std::deque<Operation> queue{};
    bool busy = false;
    bool ending = false;
};

struct Event {
    std::mutex lock{};
    std::condition_variable changed{};
    uint64_t recorded = 0;
    uint64_t completed = 0;
};

// The objects that were made and not destroyed; they outlive the threads of streams.
template <typename Object>
class Living {
  public:
    void* keep(std::shared_ptr<Object> object) {
        const std::lock_guard lock(lock_);
        return objects_.emplace(object.get(), object).first->first;
    }
    std::shared_ptr<Object> find(void* object) {
        const std::lock_guard lock(lock_);
        const auto found = objects_.find(object);
        return found == objects_.end() ? nullptr : found->second;
    }
    std::shared_ptr<Object> forget(void* object) {
        auto found = find(object);
        const std::lock_guard lock(lock_);
        objects_.erase(object);
        return found;
    }

  private:
    std::mutex lock_;
    std::unordered_map<void*, std::shared_ptr<Object>> objects_;
};

Living<Stream>& streams() {
    static auto* all = new Living<Stream>;
    return *all;
}
Living<Event>& events() {
    static auto* all = new Living<Event>;
    return *all;
}

void work(const std::shared_ptr<Stream>& stream) {
    std::unique_lock lock(stream->lock);
    for (;;) {
        stream->changed.wait(lock, [&] { return stream->ending || !stream->queue.empty(); });
        if (stream->queue.empty()) return;
        const Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->busy = true;
        lock.unlock();
        if (const int code = operation()) make_sticky(code);
        lock.lock();
        stream->busy = false;
    }
}

int enqueue(void* handle, Operation operation) {
    const auto stream = streams().find(handle);  // the legacy stream is nobody's business here
    if (!stream) return INVALID_HANDLE;
    const std::lock_guard lock(stream->lock);
    stream->queue.push_back(std::move(operation));
    stream->changed.notify_all();
    return SUCCESS;
}

// One end of a copy: a device address, or a pointer to pinned memory, for which real drivers take its device address
// too.
struct End {
    Address address;
    const void* host;
    std::byte* find(uint64_t offset, uint64_t bytes, int device) const {
        if (!host) return at(address + offset, bytes, device);
        std::byte* const pinned = pinned_at(static_cast<const std::byte*>(host) + offset, bytes);
        return pinned ? pinned : at(reinterpret_cast<Address>(host) + offset, bytes, device);
    }
};

struct Copy {
    End to;
    End from;
    uint64_t bytes;
};

int run_copy(const Copy& copy, int device, bool corrupt) {
    for (uint64_t done = 0; done < copy.bytes; done += COPY_STEP_BYTES) {
        const uint64_t step = std::min(COPY_STEP_BYTES, copy.bytes - done);
        {
            const std::shared_lock lock(table_lock());
            std::byte* to = copy.to.find(done, step, device);
            const std::byte* from = copy.from.find(done, step, device);
            if (!to || !from) return ILLEGAL_ADDRESS;
            std::memcpy(to, from, step);
            if (corrupt && done == 0) to[step / 2] ^= std::byte{1};
        }
        if (const uint64_t rate = state().header.copy_bytes_per_s.load()) {
            usleep(static_cast<useconds_t>(step * 1'000'000 / rate));
        }
    }
    return SUCCESS;
}

// What comes before each operation: the general delay, then the rules.
Verdict begin_operation(const char* symbol) {
    if (const uint64_t delay_us = state().header.operation_delay_us.load()) usleep(static_cast<useconds_t>(delay_us));
    return sticky() ? Verdict{.code = sticky()} : consult(symbol);
}

int enqueue_copies(void* stream, std::vector<Copy> copies) {
    const auto found = streams().find(stream);
    if (!found) return INVALID_HANDLE;
    return enqueue(stream, [device = found->device, copies = std::move(copies)] {
        const Verdict verdict = begin_operation("run:copy");
        if (verdict.code) return verdict.code;
        for (const Copy& copy : copies) {
            if (const int code = run_copy(copy, device, verdict.corrupt)) return code;
        }
        return SUCCESS;
    });
}

}  // namespace

int stream_create(void** handle, unsigned flags) {
    if (flags != kv::gpu::STREAM_NON_BLOCKING) return INVALID_VALUE;  // any other waits for the engine's legacy stream
    auto stream = std::make_shared<Stream>(current_device());
    std::thread(work, stream).detach();
    *handle = streams().keep(std::move(stream));
    return SUCCESS;
}

int stream_destroy(void* handle) {
    const auto stream = streams().forget(handle);
    if (!stream) return INVALID_HANDLE;
    const std::lock_guard lock(stream->lock);
    stream->ending = true;  // when what was enqueued is done
    stream->changed.notify_all();
    return SUCCESS;
}

int stream_wait(void* stream, void* handle) {
    auto event = events().find(handle);
    if (!event) return INVALID_HANDLE;
    uint64_t wanted;
    {
        const std::lock_guard lock(event->lock);
        wanted = event->recorded;
    }
    return enqueue(stream, [event, wanted] {
        std::unique_lock lock(event->lock);
        event->changed.wait(lock, [&] { return event->completed >= wanted; });
        return SUCCESS;
    });
}

int stream_query(void* handle) {
    const auto stream = streams().find(handle);
    if (!stream) return INVALID_HANDLE;
    const std::lock_guard lock(stream->lock);
    return stream->busy || !stream->queue.empty() ? NOT_READY : SUCCESS;
}

int event_create(void** handle) {
    *handle = events().keep(std::make_shared<Event>());
    return SUCCESS;
}

int event_destroy(void* handle) { return events().forget(handle) ? SUCCESS : INVALID_HANDLE; }

int event_record(void* handle, void* stream) {
    auto event = events().find(handle);
    if (!event) return INVALID_HANDLE;
    const std::lock_guard lock(event->lock);  // two records complete in the order of their numbers
    const uint64_t number = event->recorded + 1;
    const int code = enqueue(stream, [event, number] {
        const std::lock_guard completing(event->lock);
        event->completed = std::max(event->completed, number);
        event->changed.notify_all();
        return SUCCESS;
    });
    if (code == SUCCESS) event->recorded = number;
    return code;
}

int event_query(void* handle) {
    const auto event = events().find(handle);
    if (!event) return INVALID_HANDLE;
    const std::lock_guard lock(event->lock);
    return event->completed >= event->recorded ? SUCCESS : NOT_READY;
}

int copy_to_host(void* to, Address from, size_t bytes, void* stream) {
    return enqueue_copies(stream, {{{0, to}, {from, nullptr}, bytes}});
}

int copy_to_device(Address to, const void* from, size_t bytes, void* stream) {
    return enqueue_copies(stream, {{{to, nullptr}, {0, from}, bytes}});
}

int copy_batch(const Address* to, const Address* from, const size_t* bytes, size_t count, const void* attributes,
               const size_t* attribute_indices, size_t attribute_count, void* stream) {
    if (HIP && (attribute_count > 0 || attributes || attribute_indices)) return NOT_SUPPORTED;
    if (!HIP && (attribute_count != 1 || !attributes || !attribute_indices || attribute_indices[0] != 0)) {
        return INVALID_VALUE;
    }
    if (count == 0) return INVALID_VALUE;
    if (HIP && count > HIP_BATCH_MAX) {
        make_sticky(LAUNCH_FAILED);
        return LAUNCH_FAILED;
    }
    std::vector<Copy> copies;
    copies.reserve(count);
    for (size_t index = 0; index < count; index++) {
        copies.push_back({{to[index], nullptr}, {from[index], nullptr}, bytes[index]});
    }
    return enqueue_copies(stream, std::move(copies));
}

int launch(void* function, unsigned blocks, unsigned threads, void* stream, void** arguments) {
    Launch launch;
    if (!read_launch(function, arguments, launch)) return INVALID_HANDLE;
    if (blocks == 0 || threads == 0 || threads > 1024 || threads % 64 != 0) return INVALID_VALUE;
    if (launch.crews != blocks * threads / 32) return INVALID_VALUE;
    const auto found = streams().find(stream);
    if (!found) return INVALID_HANDLE;
    return enqueue(stream, [launch, device = found->device] {
        const Verdict verdict = begin_operation("run:kernel");
        if (verdict.code) return verdict.code;
        const Verdict of_report = launch.kernel == Kernel::DIGEST ? consult("run:report") : Verdict{};
        const std::shared_lock lock(table_lock());
        return run_kernel(launch, device, {verdict.corrupt, of_report.corrupt, of_report.code != 0});
    });
}

}  // namespace sim
