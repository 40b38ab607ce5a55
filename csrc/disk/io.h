// How the files of a store are read and written: many requests at a time, by io_uring or by threads.
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

// Lives where the caller put it until it was collected, and its memory as long.
struct Request {
    Direction direction;
    File file;
    uint64_t offset;
    std::byte* memory;
    uint32_t bytes;
    int64_t result = 0;  // bytes that were moved, or -errno
};

class Io {
  public:
    virtual ~Io() = default;

    // Begins the request at the next start() or collect() at the latest. io_uring: at most `requests` may be under way.
    virtual void submit(Request& request) = 0;
    // For a caller that has something else to do before it collects.
    virtual void start() {}
    // Appends the requests that have ended. Waits until one has, or wake() was called since the last collect().
    virtual void collect(std::vector<Request*>& ended) = 0;
    virtual void wake() = 0;

    // Tells of memory that requests will come from, by ascending address. Only a help: false when it cannot be had.
    virtual bool register_memory(std::byte* /*memory*/, uint64_t /*bytes*/) { return false; }

    // For the log: what carries the requests out.
    virtual std::string name() const = 0;
};

// nullptr when the system allows no io_uring; `why` says so then.
std::unique_ptr<Io> open_uring(Files files, unsigned requests, std::string& why);
std::unique_ptr<Io> open_threads(Files files, unsigned threads);

}  // namespace kv::disk
