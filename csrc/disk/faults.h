// Planned faults of a store's I/O, request by request, for tests. Also records writes, from which a test makes the
// images that a crash could have left.
//
// Threads: every method may be called from any thread.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "disk/io.h"

namespace kv::disk {

enum class Fault { NONE, ERROR, SHORT, RAGGED, TORN, FLIP, MISDIRECT, STALL };

class Faults {
  public:
    struct Event {
        const char* event;  // "begin" of a write, "end" of one that succeeded, "flush"
        uint64_t request;
        File file;
        uint64_t offset;
        std::string bytes;
    };
    struct Planned {
        Fault fault = Fault::NONE;
        int error = 0;
    };

    // Plans a fault for the nth request of all, counted from 1; with `lasting` also for all after it.
    void plan(uint64_t nth, Planned planned, bool lasting);
    // Ends all stalls, also planned ones.
    void release();
    uint64_t requests() const;
    uint64_t stalled() const;
    void record();
    std::vector<Event> trace() const;

    // Calls of FaultyIo.
    Planned next(const Request& request, uint64_t& number);
    void ended(uint64_t number);
    void flushed();
    // Holds the request until release(), which wakes `io`. False: stalls have ended.
    bool hold(Request& request, Io& io);
    // The held requests of `io` that may go on; each is returned once.
    std::vector<Request*> released(const Io& io);

  private:
    mutable std::mutex mutex_;
    uint64_t requests_ = 0;
    std::map<uint64_t, Planned> planned_;
    uint64_t lasting_from_ = UINT64_MAX;
    Planned lasting_;
    bool released_ = false;
    std::vector<std::pair<Request*, Io*>> held_;
    bool recording_ = false;
    std::vector<Event> trace_;
};

// `faults` may be null: then `io` itself is returned.
std::unique_ptr<Io> with_faults(std::unique_ptr<Io> io, std::shared_ptr<Faults> faults);

}  // namespace kv::disk
