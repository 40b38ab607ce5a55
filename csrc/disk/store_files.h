// The two files of a device: found or made, locked, preallocated, and as large as they may be.

#pragma once

#include <string>

#include "disk/format.h"
#include "shared_memory.h"

namespace kv::disk {

constexpr const char* FILE_NAME = "kvserver.store";
constexpr const char* HEADERS_NAME = "kvserver.headers";

struct FileOptions {
    std::string directory;
    uint64_t capacity_bytes;
    uint64_t segment_bytes;
    Fingerprint fingerprint;
    bool recreate;  // begins anew in place of a store that is ours, but not this one
};

struct StoreFiles {
    Descriptor directory;  // holds the lock
    Descriptor payloads;
    Descriptor headers;  // through the page cache
    Geometry geometry;
    StoreId store;
    bool created;
    bool direct;  // of payloads
};

// Refusal: "disk-size", "disk-locked", "disk-foreign", "disk-unknown", "disk-filesystem". std::system_error: the
// system's own. Nothing is changed then, and nothing new left behind.
StoreFiles open_store_files(const FileOptions& options);

}  // namespace kv::disk
