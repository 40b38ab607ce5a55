// Words of small text files, such as those of /proc and /sys.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace kv {

// The bytes of a small file; empty when it cannot be read.
std::string content_of(const std::string& path);

// The words of a text in turn. It uses no std::istream. On one machine our module had a C++ library of its own, and
// read 0 from /proc/meminfo through a stream once pyzmq had loaded another one. Shared tables of locales are the likely
// cause.
class Words {
  public:
    explicit Words(std::string text) : text_(std::move(text)) {}

    // The next word; empty at the end.
    std::string_view next();

    // Reads the next word as a decimal number. False, with `number` unchanged, when it is none.
    bool next(uint64_t& number);

  private:
    std::string text_;
    size_t at_ = 0;
};

}  // namespace kv
