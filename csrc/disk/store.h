// One device: its files, and the state of each extent, as far as orders need it.
//
// A record is made of three writes, each begun when the one before has ended: the extent's old header is overwritten
// with zeros, the payload is written, the new header is written. Only the payload goes to the device; headers go to the
// page cache, which the kernel writes back in its time. So a process that is killed at any instant leaves the old
// record, none, or the new one. All other damage is found by the header's digest of the payload when it is read: a
// power cut that loses the page cache or reorders writes of the device, a torn or misdirected write, decay. The caller
// has the index of keys: nothing here looks a key up.
//
// Threads: the caller's thread runs recover(), before an engine uses the store; then segments() belongs to the engine's
// lane.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "disk/faults.h"
#include "disk/format.h"
#include "disk/io.h"
#include "disk/store_files.h"

namespace kv::disk {

// The state of one extent. Its size counts, because a device has one for each of its extents.
struct ExtentState {
    uint64_t generation = 0;  // 0: no record that may be read
    uint64_t identity = 0;
    uint64_t digest = 0;  // of the payload
    uint32_t payload_bytes = 0;
    bool header_found = false;  // a recovery would, or might, accept the header on the device
    bool busy = false;          // an item works on it

    void forget() { generation = 0; }
    bool holds(const LedgerRecord& shard) const {
        return generation != 0 && generation == shard.generation && payload_bytes == shard.payload_bytes &&
               identity == identity_of(shard);
    }
};
static_assert(sizeof(ExtentState) == 32);

struct SegmentState {
    uint64_t extent_bytes = 0;  // 0: it serves no size
    uint64_t epoch = 0;
    uint32_t busy = 0;     // items that work in it
    bool forming = false;  // its label is being written
    std::vector<ExtentState> extents;
};

enum class Choice { AUTO, URING, THREADS };

// Bounds of an Io. Ring entries are cheap, threads are not: with more requests than threads, some wait for a thread.
struct IoBounds {
    unsigned requests;
    unsigned threads;
};

class Store {
  public:
    // `device`: the store's number in records.
    Store(const std::string& directory, StoreFiles files, uint32_t device, std::shared_ptr<Faults> faults);

    // All valid records, ascending by extent. std::system_error when no segment could be read. choice: as for
    // open_io().
    std::vector<DiskRecord> recover(Choice choice);
    // The number of entries that were neither valid, nor empty, nor EARLIER; and of those that could not be read.
    uint64_t damaged() const { return damaged_; }
    uint64_t unreadable() const { return unreadable_; }

    // Makes all completed writes durable.
    void flush();

    // Refusal("disk-engine") when io_uring is asked for but not available. `backend` gets its name, and with AUTO the
    // reason for not using io_uring.
    std::unique_ptr<Io> open_io(Choice choice, IoBounds bounds, std::string& backend) const;

    uint32_t device() const { return device_; }
    const Geometry& geometry() const { return files_.geometry; }
    const StoreId& id() const { return files_.store; }
    const std::string& directory() const { return directory_; }
    bool created() const { return files_.created; }
    uint64_t segments_cut() const { return files_.segments_cut; }
    uint32_t emptied_format() const { return files_.emptied_format; }
    bool direct() const { return files_.direct; }
    std::vector<SegmentState>& segments() { return segments_; }

  private:
    struct Piece;

    void read_all(Choice choice, const std::vector<Piece>& pieces,
                  const std::function<void(const Piece&, const Entry*)>& visit);
    void read_labels(Choice choice);
    void read_tables(Choice choice, std::vector<DiskRecord>& records);
    void take_header(const Entry& entry, Place place, std::vector<DiskRecord>& records);

    const std::string directory_;
    const uint32_t device_;
    const StoreFiles files_;
    const std::shared_ptr<Faults> faults_;
    std::vector<SegmentState> segments_;
    uint64_t damaged_ = 0;
    uint64_t unreadable_ = 0;
};

}  // namespace kv::disk
