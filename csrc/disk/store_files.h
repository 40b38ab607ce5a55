// The two files of a device: opened or made, locked, preallocated, and resized to their capacity.

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
    bool direct;              // payloads use O_DIRECT
    uint64_t segments_cut;    // segments that one of the files had and the other one had lost
    uint32_t emptied_format;  // format of an older release whose records were dropped; 0: none
};

// Other users of a store while it is read. SERVER: a server may use it, so no lock is taken. Then each entry is read at
// another moment, and some while they are written.
enum class Company { NONE, SERVER };

// A store of an older format is emptied, and used again with the options given.
//
// Refusal: "disk-size", "disk-locked", "disk-foreign", "disk-unknown", "disk-owner", "disk-filesystem".
// std::system_error: an error of the system. Nothing is changed then, and no new file is left.
StoreFiles open_store_files(const FileOptions& options);

// Opens an existing store for reading: nothing is made, resized or written, and the sizes are those of the files.
// Refusal: "disk-locked", "disk-foreign", "disk-unknown". std::system_error: an error of the system.
StoreFiles open_store_files_to_read(const std::string& directory, const Fingerprint& fingerprint, Company company);

}  // namespace kv::disk
