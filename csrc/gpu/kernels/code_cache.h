// A cache of compiled kernels on disk, so that a start needs a read instead of a compilation.
//
// A file is named by a digest of everything that determines its content, and its checksum depends on that digest. It
// appears whole, by rename. Files that are damaged, not ours or unreadable are misses, and files that cannot be written
// are not cached: neither is an error.

#pragma once

#include <optional>
#include <string>
#include <vector>

namespace kv::gpu {

// `key`: the whole text of source, options, architecture and compiler version. `directory`: made if it is missing; "":
// no cache, here and below.
std::optional<std::vector<char>> find_code(const std::string& directory, const std::string& key);
void keep_code(const std::string& directory, const std::string& key, const std::vector<char>& code);

}  // namespace kv::gpu
