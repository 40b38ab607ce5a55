// The search for a vendor's library. A copy that is mapped already (torch's, for example) must be used: two copies of a
// GPU runtime in one process do not know each other's memory.

#pragma once

#include <string>
#include <vector>

namespace kv::gpu {

struct Opened {
    void* handle = nullptr;  // of dlopen; never closed
    std::string path;        // as the linker knows it
    std::string problem;     // the attempts, when there is no handle
};

// Opens only `path` if it is not empty. Otherwise the mapped library whose file name begins with `stem`, or the first
// of `candidates` (names for the linker, or paths) that can be opened.
Opened open_library(const std::string& path, const std::string& stem, const std::vector<std::string>& candidates);

}  // namespace kv::gpu
