#include "disk/store_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <memory>
#include <span>

#include "base/check.h"

namespace kv::disk {
namespace {

// A file in the store's directory.
struct Named {
    const std::string& parent;
    int directory;
    std::string name;
    std::string path() const { return parent + "/" + name; }  // for errors
};

bool is_segment_bytes(uint64_t bytes) {
    return bytes % BLOCK_BYTES == 0 && bytes >= 3 * BLOCK_BYTES && bytes <= SEGMENT_BYTES_MAX;
}

Geometry geometry_of(const FileOptions& options) {
    const uint64_t segment = options.segment_bytes;
    if (!is_segment_bytes(segment)) {
        throw Refusal("disk-size", format("segment_bytes=%" PRIu64 " must be a multiple of %" PRIu64 " in [%" PRIu64
                                          ", %" PRIu64 "]",
                                          segment, BLOCK_BYTES, 3 * BLOCK_BYTES, SEGMENT_BYTES_MAX));
    }
    constexpr uint64_t superblocks = 2 * SEGMENTS_OFFSET;
    if (options.capacity_bytes < superblocks + segment || options.capacity_bytes > FILE_BYTES_MAX) {
        throw Refusal("disk-size", format("capacity_bytes=%" PRIu64 " must be in [%" PRIu64 ", %" PRIu64
                                          "]: one segment and %" PRIu64 " bytes at least",
                                          options.capacity_bytes, superblocks + segment, FILE_BYTES_MAX, superblocks));
    }
    return {segment, (options.capacity_bytes - superblocks) / segment};
}

Descriptor open_directory(const std::string& path) {
    Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.get() < 0) throw_errno("opening the disk directory " + path);
    return directory;
}

// Locks the directory instead of a file, so that two servers that start at once do not both make one.
Descriptor lock_directory(const std::string& path) {
    Descriptor directory = open_directory(path);
    if (::flock(directory.get(), LOCK_EX | LOCK_NB) == 0) return directory;
    if (errno == EWOULDBLOCK) throw Refusal("disk-locked", "another server uses the disk directory " + path);
    throw_errno("locking the disk directory " + path);
}

void preallocate(int fd, uint64_t bytes, const std::string& path) {
    int result;
    do {
        result = ::fallocate(fd, 0, 0, static_cast<off_t>(bytes));
    } while (result != 0 && errno == EINTR);
    if (result == 0) return;
    if (errno == EOPNOTSUPP) {
        throw Refusal("disk-filesystem", "the file system of " + path + " cannot preallocate, so it could fill up");
    }
    throw_errno(format("preallocating %" PRIu64 " bytes for %s", bytes, path.c_str()));
}

// Refuses files that other users may read or write: they could read engines' data, or give engines their own bytes.
void check_ours(int fd, const std::string& path) {
    struct stat status{};
    if (::fstat(fd, &status) != 0) throw_errno("looking at " + path);
    if (!S_ISREG(status.st_mode)) throw Refusal("disk-unknown", path + " is no plain file");
    if (status.st_uid == ::geteuid() && (status.st_mode & 077) == 0) return;
    throw Refusal("disk-owner",
                  format("%s belongs to user %u and has mode %04o; expected a file of user %u with mode 0600",
                         path.c_str(), status.st_uid, status.st_mode & 07777, ::geteuid()));
}

// Grows or shrinks a file, and allocates missing parts.
void resize(int fd, uint64_t bytes, const std::string& path) {
    if (file_bytes(fd) > bytes && ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw_errno("shortening " + path);
    preallocate(fd, bytes, path);
}

// Writes all bytes, or throws. A short write means that the rest did not fit; it has no errno of its own.
void write_whole(int fd, std::span<const std::byte> bytes, uint64_t offset, const std::string& what) {
    const ssize_t written = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written == static_cast<ssize_t>(bytes.size())) return;
    if (written >= 0) errno = ENOSPC;
    throw_errno("writing " + what);
}

void write_superblocks(int fd, const Superblock& superblock, const std::string& path) {
    const Block block = encode(superblock);
    for (uint64_t copy = 0; copy < SUPERBLOCKS; ++copy) {
        write_whole(fd, block.bytes, copy * BLOCK_BYTES, "the superblock of " + path);
    }
    if (::fsync(fd) != 0) throw_errno("fsync of " + path);
}

Superblock fresh_superblock(const FileOptions& options) {
    Superblock superblock{options.segment_bytes, {}, options.fingerprint};
    const ssize_t drawn = ::getrandom(superblock.store.data(), superblock.store.size(), 0);
    KV_ASSERT(drawn == static_cast<ssize_t>(superblock.store.size()));
    return superblock;
}

// Treatment of a file that a server left unfinished when it died. On some file systems, preallocating a large file
// takes longer than a mover may take to start. A mover that takes the file over continues where the other one was.
enum class Leftover { REMOVED, TAKEN_OVER };

// Makes a file, under another name first: a file with the right name is complete.
void create(const Named& named, uint64_t bytes, const Superblock& superblock, Leftover leftover) {
    const Named fresh{named.parent, named.directory, named.name + ".new"};
    if (leftover == Leftover::REMOVED) ::unlinkat(fresh.directory, fresh.name.c_str(), 0);
    const Descriptor file(
        ::openat(fresh.directory, fresh.name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.get() < 0) throw_errno("creating " + fresh.path());
    check_ours(file.get(), fresh.path());
    try {
        resize(file.get(), bytes, fresh.path());
        write_superblocks(file.get(), superblock, fresh.path());
        if (::renameat(fresh.directory, fresh.name.c_str(), fresh.directory, named.name.c_str()) != 0 ||
            ::fsync(fresh.directory) != 0) {
            throw_errno("renaming " + fresh.path());
        }
    } catch (...) {
        ::unlinkat(fresh.directory, fresh.name.c_str(), 0);
        throw;
    }
}

// access: O_RDWR or O_RDONLY, here and below.
Descriptor open_file(const Named& named, int access, int flags) {
    return Descriptor(::openat(named.directory, named.name.c_str(), access | O_CLOEXEC | O_NOFOLLOW | flags));
}

Descriptor open_cached(const Named& named, int access) {
    Descriptor file = open_file(named, access, 0);
    if (file.get() < 0) throw_errno("opening " + named.path());
    return file;
}

// Opened for direct I/O if a block can be read so, else through the page cache.
Descriptor open_direct(const Named& named, int access, bool& direct) {
    Descriptor file = open_file(named, access, O_DIRECT);
    const auto block = std::make_unique<Block>();
    direct = file.get() >= 0 && ::pread(file.get(), block->bytes, BLOCK_BYTES, 0) >= 0;
    if (direct) return file;
    if (errno != EINVAL) throw_errno("opening " + named.path());
    return open_cached(named, access);
}

// Reads the first valid copy, or else one of an older format. Otherwise returns the finding about the file, and its
// format version.
SuperblockFound read_superblock(int fd, Superblock& superblock, uint32_t& version, const std::string& path) {
    SuperblockFound best = SuperblockFound::NONE;
    const auto block = std::make_unique<Block>();
    for (uint64_t copy = 0; copy < SUPERBLOCKS; ++copy) {
        const ssize_t bytes = ::pread(fd, block->bytes, BLOCK_BYTES, static_cast<off_t>(copy * BLOCK_BYTES));
        if (bytes < 0 && copy + 1 == SUPERBLOCKS) throw_errno("reading the superblock of " + path);
        if (bytes != static_cast<ssize_t>(BLOCK_BYTES)) continue;
        const SuperblockFound found = decode(*block, superblock);
        if (found == SuperblockFound::VALID) return found;
        if (best != SuperblockFound::NONE && found != SuperblockFound::OLDER) continue;
        best = found;
        version = format_of(*block);
    }
    return best;
}

constexpr const char* OTHER_KIND = "has records of another kind: use the version that wrote it, or move it away";

[[noreturn]] void refuse_unknown(const Named& named) {
    throw Refusal("disk-unknown", named.path() + " is no file of ours: move it away");
}

[[noreturn]] void refuse_foreign(const Named& named, const std::string& why) {
    throw Refusal("disk-foreign", named.path() + " " + why);
}

// The superblock of a file that must be ours and undamaged.
Superblock sound_superblock(int fd, const Named& named) {
    Superblock superblock{};
    uint32_t version = 0;
    switch (read_superblock(fd, superblock, version, named.path())) {
        case SuperblockFound::VALID:
            break;
        case SuperblockFound::NONE:
            refuse_unknown(named);
        case SuperblockFound::OLDER:
            refuse_foreign(named, format("is of format %u of an older release, expected %u: a server of this release "
                                         "empties it when it starts",
                                         version, FORMAT));
        case SuperblockFound::NEWER:
            refuse_foreign(named, format("is of format %u, expected %u: use the version that wrote it, or move it away",
                                         version, FORMAT));
        case SuperblockFound::DAMAGED:
            refuse_foreign(named, "has damaged superblocks, both of them: move it away");
    }
    return superblock;
}

Superblock payloads_superblock(int fd, const Named& named, const Fingerprint& fingerprint) {
    const Superblock superblock = sound_superblock(fd, named);
    if (superblock.fingerprint == fingerprint && is_segment_bytes(superblock.segment_bytes)) return superblock;
    refuse_foreign(named, OTHER_KIND);
}

void check_same_store(int headers, const Named& named, const StoreId& store) {
    if (sound_superblock(headers, named).store == store) return;
    refuse_foreign(named, "belongs to another store than " + std::string(FILE_NAME) +
                              " beside it: put its own there, or move it away");
}

// Whether the file exists and is not empty.
bool exists(const Named& named) {
    struct stat status{};
    if (::fstatat(named.directory, named.name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) return false;
        throw_errno("looking for " + named.path());
    }
    if (!S_ISREG(status.st_mode)) throw Refusal("disk-unknown", named.path() + " is no plain file");
    return status.st_size > 0;
}

void refuse_nothing(const Named& named) {
    if (exists(named)) return;
    refuse_foreign(named, "is missing or empty, so there are no records");
}

// Shrinks a file to its old size. An error is ignored: the error before it is reported.
void give_back(int fd, uint64_t bytes) {
    if (file_bytes(fd) > bytes) (void)!::ftruncate(fd, static_cast<off_t>(bytes));
}

// The number of whole parts that a file has after its superblocks.
uint64_t whole_parts(int fd, uint64_t part_bytes) {
    return (std::max(file_bytes(fd), SEGMENTS_OFFSET) - SEGMENTS_OFFSET) / part_bytes;
}

class Opening {
  public:
    explicit Opening(const FileOptions& options) : options_(options) {
        files_.geometry = geometry_of(options);
        files_.directory = lock_directory(options.directory);
    }

    StoreFiles open() && {
        if (!exists(payloads())) create_both();
        files_.payloads = open_direct(payloads(), O_RDWR, files_.direct);
        if (is_older()) empty();
        check_payloads();
        check_ours(files_.payloads.get(), payloads().path());
        if (!exists(headers())) create_headers();
        files_.headers = open_cached(headers(), O_RDWR);
        check_same_store(files_.headers.get(), headers(), superblock_.store);
        check_ours(files_.headers.get(), headers().path());
        resize_both();
        files_.store = superblock_.store;
        return std::move(files_);
    }

  private:
    Named payloads() const { return {options_.directory, files_.directory.get(), FILE_NAME}; }
    Named headers() const { return {options_.directory, files_.directory.get(), HEADERS_NAME}; }

    // Whether the payloads are of an older format. Notes which one.
    bool is_older() {
        Superblock superblock{};
        uint32_t version = 0;
        const int payloads_fd = files_.payloads.get();
        if (read_superblock(payloads_fd, superblock, version, payloads().path()) != SuperblockFound::OLDER)
            return false;
        check_ours(payloads_fd, payloads().path());
        if (superblock.fingerprint != options_.fingerprint) refuse_foreign(payloads(), OTHER_KIND);
        files_.emptied_format = version;
        return true;
    }

    // Makes an empty store of one of an older format, in place: there may be no room for another. Its superblocks come
    // last, so the next start begins anew if this one does not get there.
    void empty() {
        const int payloads_fd = files_.payloads.get();
        check_replaceable_headers();
        const uint64_t bytes_before = file_bytes(payloads_fd);
        try {
            resize(payloads_fd, files_.geometry.payload_file_bytes(), payloads().path());
        } catch (...) {
            give_back(payloads_fd, bytes_before);
            throw;
        }
        superblock_ = fresh_superblock(options_);
        ::unlinkat(files_.directory.get(), HEADERS_NAME, 0);
        create_headers();
        write_superblocks(payloads_fd, superblock_, payloads().path());
    }

    // Headers without their payloads are useless, even damaged ones. Other files of that name are refused.
    void check_replaceable_headers() const {
        if (!exists(headers())) return;
        Superblock superblock{};
        uint32_t version = 0;
        const Descriptor file = open_cached(headers(), O_RDONLY);
        const SuperblockFound found = read_superblock(file.get(), superblock, version, headers().path());
        if (found == SuperblockFound::NONE) refuse_unknown(headers());
    }

    void create_both() {
        check_replaceable_headers();
        superblock_ = fresh_superblock(options_);
        create_headers();
        try {
            create(payloads(), files_.geometry.payload_file_bytes(), superblock_, Leftover::TAKEN_OVER);
        } catch (...) {
            ::unlinkat(files_.directory.get(), HEADERS_NAME, 0);
            throw;
        }
    }

    // Makes an empty header file. Without headers there are no records, even if there are payloads.
    void create_headers() {
        create(headers(), files_.geometry.header_file_bytes(), superblock_, Leftover::REMOVED);
        files_.created = true;
    }

    void check_payloads() {
        superblock_ = payloads_superblock(files_.payloads.get(), payloads(), options_.fingerprint);
        if (superblock_.segment_bytes == options_.segment_bytes) return;
        refuse_foreign(payloads(), format("has segments of %" PRIu64 " bytes, expected disk_segment_bytes=%" PRIu64
                                          ": set that to what it has, or move it away",
                                          superblock_.segment_bytes, options_.segment_bytes));
    }

    void resize_both() {
        const int payloads_fd = files_.payloads.get();
        const int headers_fd = files_.headers.get();
        const uint64_t payloads_before = file_bytes(payloads_fd);
        const uint64_t whole_rows = whole_parts(payloads_fd, files_.geometry.row_bytes());
        const uint64_t headers_before = file_bytes(headers_fd);
        // Both files grow and shrink together, so one with fewer segments than the other was cut.
        const uint64_t whole_tables = whole_parts(headers_fd, Geometry::table_bytes(files_.geometry.segment_bytes));
        files_.segments_cut = std::max(whole_rows, whole_tables) - std::min(whole_rows, whole_tables);
        try {
            resize(headers_fd, files_.geometry.header_file_bytes(), headers().path());
            wipe_labels(whole_rows);
            resize(payloads_fd, files_.geometry.payload_file_bytes(), payloads().path());
        } catch (...) {
            give_back(headers_fd, headers_before);
            give_back(payloads_fd, payloads_before);
            throw;
        }
    }

    // Zeroes the labels of segments whose row of payloads is not complete: their records are gone.
    void wipe_labels(uint64_t whole_rows) const {
        const Geometry& geometry = files_.geometry;
        for (uint64_t segment = whole_rows; segment < geometry.segments; ++segment) {
            const Entry zeros{};
            const std::string what = "a label of " + headers().path();
            write_whole(files_.headers.get(), zeros.bytes, geometry.label_offset(segment), what);
        }
    }

    const FileOptions& options_;
    StoreFiles files_{};
    Superblock superblock_{};
};

}  // namespace

StoreFiles open_store_files(const FileOptions& options) { return Opening(options).open(); }

StoreFiles open_store_files_to_read(const std::string& directory, const Fingerprint& fingerprint, Company company) {
    StoreFiles files{};
    files.directory = company == Company::NONE ? lock_directory(directory) : open_directory(directory);
    const Named payloads{directory, files.directory.get(), FILE_NAME};
    const Named headers{directory, files.directory.get(), HEADERS_NAME};
    refuse_nothing(payloads);
    files.payloads = open_direct(payloads, O_RDONLY, files.direct);
    const Superblock superblock = payloads_superblock(files.payloads.get(), payloads, fingerprint);
    refuse_nothing(headers);
    files.headers = open_cached(headers, O_RDONLY);
    check_same_store(files.headers.get(), headers, superblock.store);
    files.store = superblock.store;
    Geometry& geometry = files.geometry;
    geometry.segment_bytes = superblock.segment_bytes;
    // The file with more segments counts, so that parts cut off the other one show.
    geometry.segments = std::max(whole_parts(files.payloads.get(), geometry.row_bytes()),
                                 whole_parts(files.headers.get(), Geometry::table_bytes(geometry.segment_bytes)));
    return files;
}

}  // namespace kv::disk
