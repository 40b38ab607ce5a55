// One device: its files, and what each of its extents holds as far as carrying out orders needs it.
//
// A record is made of three writes, each begun when the one before has ended: the header of what the extent held is
// overwritten with zeros, the payload goes into its place, the header is written. Only the payload goes to the device;
// headers go to the page cache, which the kernel writes back in its time. So a process that is killed at any instant
// leaves the old record, none, or the new one. Whatever else happens (a power cut that takes the page cache and loses
// or reorders what the device had taken, a torn or misdirected write, decay), the header's checksum of the payload says
// so when it is read. The index of what is where is the caller's: nothing here looks a key up.
//
// Threads: recover() by the caller's, before an engine uses the store; then segments() belongs to the engine's lane.

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

// What a position of a segment holds, times all extents of a device.
struct ExtentState {
    uint64_t generation = 0;  // 0: no record that may be read
    uint64_t identity = 0;
    uint64_t payload_hash = 0;
    uint32_t payload_bytes = 0;
    bool header_found = false;  // a recovery would, or might, accept the header that is there
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

// Ring entries are cheap, threads are not: more requests than threads wait for one.
struct IoBounds {
    unsigned requests;
    unsigned threads;
};

class Store {
  public:
    // `device`: the store's number in records.
    Store(const std::string& directory, StoreFiles files, uint32_t device, std::shared_ptr<Faults> faults);

    // All valid records, ascending by extent. std::system_error when not one segment could be read.
    // As open_io() for the choice.
    std::vector<DiskRecord> recover(Choice choice);
    // Entries that were neither valid, nor empty, nor of an earlier life; and entries that could not be read.
    uint64_t damaged() const { return damaged_; }
    uint64_t unreadable() const { return unreadable_; }

    // Makes durable what has ended.
    void flush();

    // Refusal("disk-engine") when io_uring is asked for and not to be had. `backend` gets its name, and why it is not
    // the other.
    std::unique_ptr<Io> open_io(Choice choice, IoBounds bounds, std::string& backend) const;

    uint32_t device() const { return device_; }
    const Geometry& geometry() const { return files_.geometry; }
    const StoreId& id() const { return files_.store; }
    const std::string& directory() const { return directory_; }
    bool created() const { return files_.created; }
    uint64_t segments_cut() const { return files_.segments_cut; }
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
