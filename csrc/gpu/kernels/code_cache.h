// A cache of compiled kernels on disk, so that a start needs a read instead of a compilation.
//
// A file is named by a digest of everything that determines its content, and its checksum depends on that digest. It
// appears whole, by rename. Files that are damaged, not ours or unreadable are misses, and files that cannot be written
// are not cached: neither is an error.

#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kv::gpu {

class CodeCache {
  public:
    // `directory` is made if it is missing; "": no cache.
    explicit CodeCache(std::string directory) : directory_(std::move(directory)) {}

    // `key`: the whole text of source, options, architecture and compiler version.
    std::optional<std::vector<char>> find(const std::string& key) const;
    void keep(const std::string& key, const std::vector<char>& code) const;

  private:
    std::string directory_;
};

}  // namespace kv::gpu
