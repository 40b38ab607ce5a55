#include "arena/available_memory.h"

#include <algorithm>
#include <cinttypes>
#include <fstream>
#include <limits>
#include <string>

namespace kv {
namespace {

constexpr uint64_t UNLIMITED = std::numeric_limits<uint64_t>::max();

// The number after `key` in a file of "key value" lines; `otherwise` when there is none.
uint64_t number_in(const std::string& path, const std::string& key, uint64_t otherwise) {
    std::ifstream file(path);
    std::string word;
    uint64_t number = 0;
    while (file >> word) {
        if (word == key && file >> number) return number;
    }
    return otherwise;
}

// The value of a file with one number, or "max".
uint64_t number_of(const std::string& path, uint64_t otherwise) {
    std::ifstream file(path);
    uint64_t number = 0;
    return file >> number ? number : otherwise;
}

std::string control_group() {
    std::ifstream file("/proc/self/cgroup");
    std::string line;
    while (std::getline(file, line)) {
        if (line.starts_with("0::")) return line.substr(3);
    }
    return "/";
}

uint64_t left_in_group(const std::string& directory) {
    const uint64_t limit = number_of(directory + "/memory.max", UNLIMITED);
    if (limit == UNLIMITED) return UNLIMITED;
    const std::string details = directory + "/memory.stat";
    const uint64_t droppable = number_in(details, "inactive_file", 0) + number_in(details, "active_file", 0);
    const uint64_t used = number_of(directory + "/memory.current", 0);
    const uint64_t held = used - std::min(used, droppable);
    return limit - std::min(limit, held);
}

}  // namespace

uint64_t available_memory_bytes() {
    const uint64_t kilobytes = number_in("/proc/meminfo", "MemAvailable:", UNLIMITED / 1024);
    uint64_t available = kilobytes * 1024;
    // Every ancestor may have a limit. Inside a container the path may name groups that are not visible here; their
    // limits are unknown.
    for (std::string path = control_group();; path.erase(path.rfind('/'))) {
        available = std::min(available, left_in_group("/sys/fs/cgroup" + path));
        if (path.find('/') == std::string::npos) return available;
    }
}

}  // namespace kv
