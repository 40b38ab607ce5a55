// Compiled kernels on disk, so that a start costs a read and not a compilation.
//
// A file is named by a digest of everything that decides its content, and its checksum depends on that digest. It
// appears whole, by rename. What is damaged, not ours or unreadable is no hit, and what cannot be written is not
// cached: neither is an error.

#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kv::gpu {

class CodeCache {
  public:
    // `directory` is made when it is missing; "" = no cache.
    explicit CodeCache(std::string directory) : directory_(std::move(directory)) {}

    // `key`: the whole text of source, options, architecture and compiler version.
    std::optional<std::vector<char>> find(const std::string& key) const;
    void keep(const std::string& key, const std::vector<char>& code) const;

  private:
    std::string directory_;
};

}  // namespace kv::gpu
