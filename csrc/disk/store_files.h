// The two files of a device: found or made, locked, preallocated, and as large as they may be.

#pragma once

#include <string>

#include "base/shared_memory.h"
#include "disk/format.h"

namespace kv::disk {

constexpr const char* FILE_NAME = "kvserver.store";
constexpr const char* HEADERS_NAME = "kvserver.headers";

struct FileOptions {
    std::string directory;
    uint64_t capacity_bytes;
    uint64_t segment_bytes;
    Fingerprint fingerprint;
};

struct StoreFiles {
    Descriptor directory;  // holds the lock, if there is one
    Descriptor payloads;
    Descriptor headers;  // through the page cache
    Geometry geometry;
    StoreId store;
    bool created;
    bool direct;            // of payloads
    uint64_t segments_cut;  // that one of the files had, and the other one had lost
};

// Who may be at work on a store while it is read. SERVER: no lock, so each entry is read as of another moment, and some
// while it is written.
enum class Company { NONE, SERVER };

// Refusal: "disk-size", "disk-locked", "disk-foreign", "disk-unknown", "disk-owner", "disk-filesystem".
// std::system_error: the system's own. Nothing is changed then, and nothing new left behind.
StoreFiles open_store_files(const FileOptions& options);

// The same store as it was left, for whoever looks at it: nothing is made, resized or written, and the sizes are those
// that the files have. Refusal: "disk-locked", "disk-foreign", "disk-unknown". std::system_error: the system's own.
StoreFiles open_store_files_to_read(const std::string& directory, const Fingerprint& fingerprint, Company company);

}  // namespace kv::disk
