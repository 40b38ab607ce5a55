#include "base/words.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>

namespace kv {

std::string content_of(const std::string& path) {
    std::string content;
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return content;
    char part[4096];
    for (;;) {
        const ssize_t bytes = ::read(file, part, sizeof part);
        if (bytes > 0) content.append(part, static_cast<size_t>(bytes));
        if (bytes == 0 || (bytes < 0 && errno != EINTR)) break;
    }
    ::close(file);
    return content;
}

std::string_view Words::next() {
    constexpr const char* SPACES = " \t\r\n";
    const size_t from = text_.find_first_not_of(SPACES, at_);
    if (from == std::string::npos) return {};
    at_ = std::min(text_.find_first_of(SPACES, from), text_.size());
    return std::string_view(text_).substr(from, at_ - from);
}

bool Words::next(uint64_t& number) {
    const std::string_view word = next();
    uint64_t read = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), read);
    if (word.empty() || error != std::errc() || end != word.data() + word.size()) return false;
    number = read;
    return true;
}

}  // namespace kv
