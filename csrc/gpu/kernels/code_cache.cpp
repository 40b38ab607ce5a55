#include "gpu/kernels/code_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <span>

#include "base/check.h"
#include "base/checksum.h"
#include "base/words.h"

namespace kv::gpu {
namespace {

struct Head {
    char magic[8];
    uint64_t code_bytes;
    uint64_t check;  // checksum of the code, seeded with the key's digest, so that a renamed file does not match
};
constexpr char MAGIC[8] = {'K', 'V', 'C', 'O', 'D', 'E', '0', '1'};
constexpr off_t FILE_BYTES_MAX = 64 << 20;

std::filesystem::path file_of(const std::string& directory, const std::string& key) {
    const auto bytes = std::as_bytes(std::span(key));
    const std::string name = format("kernels-%016lx%016lx.bin", checksum(bytes, 0), checksum(bytes, 1));
    return std::filesystem::path(directory) / name;
}

uint64_t check_of(const std::vector<char>& code, const std::string& key) {
    return checksum(std::as_bytes(std::span(code)), checksum(std::as_bytes(std::span(key)), 0));
}

// Whether only this user can have written the file: its code runs on the GPU with the engine's data. No code is larger.
bool trusted(const std::filesystem::path& file) {
    struct stat found;
    return lstat(file.c_str(), &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
           (found.st_mode & (S_IWGRP | S_IWOTH)) == 0 && found.st_size <= FILE_BYTES_MAX;
}

}  // namespace

std::optional<std::vector<char>> find_code(const std::string& directory, const std::string& key) {
    if (directory.empty()) return std::nullopt;
    const std::filesystem::path file = file_of(directory, key);
    if (!trusted(file)) return std::nullopt;
    const std::string content = content_of(file);
    Head head;
    if (content.size() < sizeof head) return std::nullopt;
    std::memcpy(&head, content.data(), sizeof head);
    if (std::memcmp(head.magic, MAGIC, sizeof MAGIC) != 0) return std::nullopt;
    if (head.code_bytes > content.size() - sizeof head) return std::nullopt;
    const char* first = content.data() + sizeof head;
    std::vector<char> code(first, first + head.code_bytes);
    if (head.check != check_of(code, key)) return std::nullopt;
    return code;
}

void keep_code(const std::string& directory, const std::string& key, const std::vector<char>& code) {
    if (directory.empty()) return;
    const std::filesystem::path file = file_of(directory, key);
    const std::filesystem::path unfinished = file.string() + format(".%d", static_cast<int>(getpid()));
    std::error_code refused;
    std::filesystem::create_directories(directory, refused);
    Head head{{}, code.size(), check_of(code, key)};
    std::memcpy(head.magic, MAGIC, sizeof MAGIC);
    FILE* written = std::fopen(unfinished.c_str(), "wbe");
    if (written == nullptr) return;
    std::filesystem::permissions(unfinished, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write,
                                 refused);
    const bool is_whole = std::fwrite(&head, sizeof head, 1, written) == 1 &&
                          std::fwrite(code.data(), 1, code.size(), written) == code.size();
    if (std::fclose(written) == 0 && is_whole) {
        std::filesystem::rename(unfinished, file, refused);
    } else {
        std::filesystem::remove(unfinished, refused);
    }
}

}  // namespace kv::gpu
