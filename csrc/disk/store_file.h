// The one file of a device: found or made, locked, preallocated, and as large as it may be.

#pragma once

#include <string>

#include "disk/format.h"
#include "shared_memory.h"

namespace kv::disk {

constexpr const char* FILE_NAME = "kvserver.store";

struct FileOptions {
    std::string directory;
    uint64_t capacity_bytes;
    uint64_t segment_bytes;
    Fingerprint fingerprint;
    bool recreate;  // begins anew in place of a store that is ours, but not this one
};

struct StoreFile {
    Descriptor directory;  // holds the lock
    Descriptor file;
    Geometry geometry;
    StoreId store;
    bool created;
    bool direct;
};

// Refusal: "disk-size", "disk-locked", "disk-foreign", "disk-unknown", "disk-filesystem". std::system_error: the
// system's own. Nothing is changed then, and nothing new left behind.
StoreFile open_store_file(const FileOptions& options);

}  // namespace kv::disk
