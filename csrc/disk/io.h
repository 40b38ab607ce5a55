// I/O on the files of a store: many requests at a time, by io_uring or by threads.
//
// Threads: one thread submits and collects; any thread may call wake().

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kv::disk {

enum class Direction { READ, WRITE };
enum class File { PAYLOADS, HEADERS };

// Descriptors; they stay the caller's.
struct Files {
    int payloads;
    int headers;
    int of(File file) const { return file == File::PAYLOADS ? payloads : headers; }
};

// The request and its memory must stay in place until the request was collected.
struct Request {
    Direction direction;
    File file;
    uint64_t offset;
    std::byte* memory;
    uint32_t bytes;
    int64_t result = 0;  // bytes that were transferred, or -errno
};

class Io {
  public:
    virtual ~Io() = default;

    // Begins the request, at the latest in the next start() or collect(). io_uring: at most `requests` may be under
    // way.
    virtual void submit(Request& request) = 0;
    // Begins submitted requests now, for a caller that has other work before it collects.
    virtual void start() {}
    // Appends the requests that have ended. Waits until one has, or wake() was called since the last collect().
    virtual void collect(std::vector<Request*>& ended) = 0;
    virtual void wake() = 0;

    // Registers memory of later requests, by ascending address, to make them faster. False when that is not possible.
    virtual bool register_memory(std::byte* /*memory*/, uint64_t /*bytes*/) { return false; }

    // Name of the method, for the log.
    virtual std::string name() const = 0;
};

// nullptr when the system does not allow io_uring; `why` has the reason then.
std::unique_ptr<Io> open_uring(Files files, unsigned requests, std::string& why);
std::unique_ptr<Io> open_threads(Files files, unsigned threads);

}  // namespace kv::disk
