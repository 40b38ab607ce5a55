#include "gpu/kernels/digest_tables.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/digest.h"

namespace kv::gpu {
namespace {

constexpr uint64_t ROWS_LEAST = 256;

uint64_t rows_of(uint64_t payload_bytes) {
    return (std::min(payload_bytes, DIGEST_PAYLOAD_BYTES_MAX) + DIGEST_ROW_BYTES - 1) / DIGEST_ROW_BYTES;
}

}  // namespace

void DigestMemory::reach(uint64_t payload_bytes) {
    if (reaches(payload_bytes)) return;
    const uint64_t rows = std::bit_ceil(std::max(rows_of(payload_bytes), ROWS_LEAST));
    const auto columns = digest_columns();
    const std::vector<uint64_t> entries = digest_rows(rows);
    std::vector<std::byte> content(sizeof columns + rows * sizeof entries[0]);
    std::memcpy(content.data(), columns.data(), sizeof columns);
    std::memcpy(&content[sizeof columns], entries.data(), rows * sizeof entries[0]);
    std::optional<DeviceMemory> memory = DeviceMemory::take(driver_, content.size());
    if (!memory) {
        throw Refusal("device-memory",
                      format("no %zu bytes of device memory are left for the tables of digests", content.size()));
    }
    memory->fill(content);
    const std::lock_guard lock(mutex_);
    tables_.push_back(std::move(*memory));
    rows_ = rows;
}

bool DigestMemory::reaches(uint64_t payload_bytes) const {
    const std::lock_guard lock(mutex_);
    return !tables_.empty() && rows_of(payload_bytes) <= rows_;
}

DigestTables DigestMemory::get() const {
    const std::lock_guard lock(mutex_);
    KV_ASSERT(!tables_.empty());
    const Address columns = tables_.back().address();
    return {columns, columns + sizeof(digest_columns())};
}

}  // namespace kv::gpu
