// The tables of digests (base/digest.h) in the memory of a device, for kv_digest.

#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "gpu/driver/driver.h"
#include "gpu/driver/handles.h"

namespace kv::gpu {

// digest_columns() and digest_rows() in device memory. There is a row for each that a piece touches.
struct DigestTables {
    Address columns;
    Address rows;
};

// One per process and device. One thread calls reach(), any others the rest. The result of get() stays until the end.
class DigestMemory {
  public:
    explicit DigestMemory(const Driver& driver) : driver_(driver) {}

    // From now on get() has rows for payloads of that length; DIGEST_PAYLOAD_BYTES_MAX stands for longer ones. Takes
    // memory and waits for the device, unless it was called for such a length before. Refusal("device-memory").
    void reach(uint64_t payload_bytes);
    // Whether it was.
    bool reaches(uint64_t payload_bytes) const;
    DigestTables get() const;

  private:
    const Driver& driver_;
    mutable std::mutex mutex_;          // guards the tables
    std::vector<DeviceMemory> tables_;  // the last one has the most rows; kernels may still read the others
    uint64_t rows_ = 0;
};

}  // namespace kv::gpu
