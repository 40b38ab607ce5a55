// Where a vendor's library is. A copy that is mapped already (torch's, say) must be the one that we use: two copies of
// a GPU runtime in one process know nothing of each other's memory.

#pragma once

#include <string>
#include <vector>

namespace kv::gpu {

struct Opened {
    void* handle = nullptr;  // of dlopen; never closed
    std::string path;        // as the linker knows it
    std::string problem;     // what was tried, when there is no handle
};

// The path of a mapped library whose file name begins with `stem` ("libcuda.so"); "" when there is none.
std::string mapped_library(const std::string& stem);

// Opens `path` and nothing else when it is not empty; otherwise the mapped copy of `stem`, otherwise the first of
// `candidates` (names for the linker, or paths) that can be opened.
Opened open_library(const std::string& path, const std::string& stem, const std::vector<std::string>& candidates);

}  // namespace kv::gpu
