#include "gpu/kernels/code_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>

#include "base/check.h"
#include "base/checksum.h"

namespace kv::gpu {
namespace {

struct Head {
    char magic[8];
    uint64_t code_bytes;
    uint64_t check;  // checksum of the code, seeded with the key's digest, so that a renamed file does not match
};
constexpr char MAGIC[8] = {'K', 'V', 'C', 'O', 'D', 'E', '0', '1'};
constexpr uint64_t CODE_BYTES_MAX = 64 << 20;

struct Digest {
    uint64_t first;
    uint64_t second;
};

Digest digest_of(const std::string& key) {
    const auto bytes = std::as_bytes(std::span(key));
    return {checksum(bytes, 0), checksum(bytes, 1)};
}

std::filesystem::path file_of(const std::string& directory, const Digest& digest) {
    return std::filesystem::path(directory) / format("kernels-%016lx%016lx.bin", digest.first, digest.second);
}

uint64_t check_of(const std::vector<char>& code, const Digest& digest) {
    return checksum(std::as_bytes(std::span(code)), digest.first);
}

// Whether only this user can have written the file: its code runs on the GPU with the engine's data.
bool trusted(const std::filesystem::path& file) {
    struct stat found;
    return lstat(file.c_str(), &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
           (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

}  // namespace

std::optional<std::vector<char>> CodeCache::find(const std::string& key) const {
    if (directory_.empty()) return std::nullopt;
    const Digest digest = digest_of(key);
    const std::filesystem::path file = file_of(directory_, digest);
    if (!trusted(file)) return std::nullopt;
    std::ifstream stream(file, std::ios::binary);
    Head head;
    if (!stream.read(reinterpret_cast<char*>(&head), sizeof head)) return std::nullopt;
    if (std::memcmp(head.magic, MAGIC, sizeof MAGIC) != 0 || head.code_bytes > CODE_BYTES_MAX) return std::nullopt;
    std::vector<char> code(head.code_bytes);
    if (!stream.read(code.data(), static_cast<std::streamsize>(code.size()))) return std::nullopt;
    if (head.check != check_of(code, digest)) return std::nullopt;
    return code;
}

void CodeCache::keep(const std::string& key, const std::vector<char>& code) const {
    if (directory_.empty()) return;
    const Digest digest = digest_of(key);
    const std::filesystem::path file = file_of(directory_, digest);
    const std::filesystem::path unfinished = file.string() + format(".%d", static_cast<int>(getpid()));
    std::error_code refused;
    std::filesystem::create_directories(directory_, refused);
    Head head{{}, code.size(), check_of(code, digest)};
    std::memcpy(head.magic, MAGIC, sizeof MAGIC);
    std::ofstream stream(unfinished, std::ios::binary | std::ios::trunc);
    std::filesystem::permissions(unfinished, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write,
                                 refused);
    stream.write(reinterpret_cast<const char*>(&head), sizeof head);
    stream.write(code.data(), static_cast<std::streamsize>(code.size()));
    stream.close();
    if (stream.good()) {
        std::filesystem::rename(unfinished, file, refused);
    } else {
        std::filesystem::remove(unfinished, refused);
    }
}

}  // namespace kv::gpu
