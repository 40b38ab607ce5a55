#include "disk/store_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <memory>

#include "check.h"

namespace kv::disk {
namespace {

const std::string NEW_FILE_NAME = std::string(FILE_NAME) + ".new";

// A file in the store's directory, by its name in errors.
struct Named {
    const FileOptions& options;
    std::string name;
    std::string path() const { return options.directory + "/" + name; }
};

Geometry geometry_of(const FileOptions& options) {
    const uint64_t segment = options.segment_bytes;
    if (segment % BLOCK_BYTES != 0 || segment < 3 * BLOCK_BYTES || segment > SEGMENT_BYTES_MAX) {
        throw Refusal("disk-size", format("segment_bytes=%" PRIu64 " must be a multiple of %" PRIu64 " in [%" PRIu64
                                          ", %" PRIu64 "]",
                                          segment, BLOCK_BYTES, 3 * BLOCK_BYTES, SEGMENT_BYTES_MAX));
    }
    if (options.capacity_bytes < SEGMENTS_OFFSET + segment || options.capacity_bytes > FILE_BYTES_MAX) {
        throw Refusal("disk-size",
                      format("capacity_bytes=%" PRIu64 " must be in [%" PRIu64 ", %" PRIu64
                             "]: one segment and %" PRIu64 " bytes at least",
                             options.capacity_bytes, SEGMENTS_OFFSET + segment, FILE_BYTES_MAX, SEGMENTS_OFFSET));
    }
    return {segment, (options.capacity_bytes - SEGMENTS_OFFSET) / segment};
}

// The directory is locked, not the file: two servers that begin at once must not both make one.
Descriptor lock_directory(const std::string& path) {
    Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.get() < 0) throw_errno("opening the disk directory " + path);
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

void write_superblocks(int fd, const Superblock& superblock, const std::string& path) {
    const Block block = encode(superblock);
    for (uint64_t copy = 0; copy < SUPERBLOCKS; ++copy) {
        const ssize_t written = ::pwrite(fd, block.bytes, BLOCK_BYTES, static_cast<off_t>(copy * BLOCK_BYTES));
        if (written != static_cast<ssize_t>(BLOCK_BYTES)) throw_errno("writing the superblock of " + path);
    }
    if (::fsync(fd) != 0) throw_errno("fsync of " + path);
}

Superblock fresh_superblock(const FileOptions& options) {
    Superblock superblock{options.segment_bytes, {}, options.fingerprint};
    const ssize_t drawn = ::getrandom(superblock.store.data(), superblock.store.size(), 0);
    KV_ASSERT(drawn == static_cast<ssize_t>(superblock.store.size()));
    return superblock;
}

// Made under another name first: a file of the right name is whole.
void create(const FileOptions& options, const Geometry& geometry, int directory) {
    const Named fresh{options, NEW_FILE_NAME};
    ::unlinkat(directory, fresh.name.c_str(), 0);  // of a server that died here
    const Descriptor file(
        ::openat(directory, fresh.name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.get() < 0) throw_errno("creating " + fresh.path());
    try {
        preallocate(file.get(), geometry.file_bytes(), fresh.path());
        write_superblocks(file.get(), fresh_superblock(options), fresh.path());
        if (::renameat(directory, fresh.name.c_str(), directory, FILE_NAME) != 0 || ::fsync(directory) != 0) {
            throw_errno("renaming " + fresh.path());
        }
    } catch (...) {
        ::unlinkat(directory, fresh.name.c_str(), 0);
        throw;
    }
}

// Opened for direct I/O if a block can be read so, else through the page cache.
Descriptor open_file(const Named& named, int directory, bool& direct) {
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    Descriptor file(::openat(directory, named.name.c_str(), flags | O_DIRECT));
    const auto block = std::make_unique<Block>();
    direct = file.get() >= 0 && ::pread(file.get(), block->bytes, BLOCK_BYTES, 0) >= 0;
    if (direct) return file;
    if (errno != EINVAL) throw_errno("opening " + named.path());
    file = Descriptor(::openat(directory, named.name.c_str(), flags));
    if (file.get() < 0) throw_errno("opening " + named.path());
    return file;
}

// The first copy that is whole; else what is to be said of the file.
SuperblockFound read_superblock(int fd, Superblock& superblock, const std::string& path) {
    SuperblockFound best = SuperblockFound::NONE;
    const auto block = std::make_unique<Block>();
    for (uint64_t copy = 0; copy < SUPERBLOCKS; ++copy) {
        const ssize_t bytes = ::pread(fd, block->bytes, BLOCK_BYTES, static_cast<off_t>(copy * BLOCK_BYTES));
        if (bytes < 0 && copy + 1 == SUPERBLOCKS) throw_errno("reading the superblock of " + path);
        if (bytes != static_cast<ssize_t>(BLOCK_BYTES)) continue;
        const SuperblockFound found = decode(*block, superblock);
        if (found == SuperblockFound::VALID) return found;
        if (best == SuperblockFound::NONE) best = found;
    }
    return best;
}

std::string difference(const Superblock& found, const FileOptions& options) {
    if (found.segment_bytes != options.segment_bytes) {
        return format("has segments of %" PRIu64 " bytes, not %" PRIu64, found.segment_bytes, options.segment_bytes);
    }
    return found.fingerprint == options.fingerprint ? "" : "was made under another configuration";
}

// Refusal when the store is not the one that is asked for; begins it anew where that was asked for as well.
void check_superblock(int fd, SuperblockFound found, Superblock& superblock, const Named& named, bool& created) {
    std::string why;
    switch (found) {
        case SuperblockFound::NONE:
            throw Refusal("disk-unknown", named.path() + " is no store of ours: move it away");
        case SuperblockFound::OTHER_FORMAT:
            why = "is of another format version";
            break;
        case SuperblockFound::DAMAGED:
            why = "has a damaged superblock";
            break;
        case SuperblockFound::VALID:
            why = difference(superblock, named.options);
            break;
    }
    if (why.empty()) return;
    if (!named.options.recreate) throw Refusal("disk-foreign", named.path() + " " + why);
    superblock = fresh_superblock(named.options);  // a new id: nothing that lies there is valid any more
    write_superblocks(fd, superblock, named.path());
    created = true;
}

// Grows or shrinks, and makes real what was lost of the file.
void resize(int fd, const Geometry& geometry, const std::string& path) {
    const uint64_t before = file_bytes(fd);
    const auto wanted = static_cast<off_t>(geometry.file_bytes());
    if (before > geometry.file_bytes() && ::ftruncate(fd, wanted) != 0) throw_errno("shortening " + path);
    try {
        preallocate(fd, geometry.file_bytes(), path);
    } catch (...) {
        // Gives back what could be had; when even that fails, the first failure is what is worth telling.
        if (before < geometry.file_bytes()) (void)!::ftruncate(fd, static_cast<off_t>(before));
        throw;
    }
}

bool exists(int directory) {
    struct stat status{};
    if (::fstatat(directory, FILE_NAME, &status, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) return false;
        throw_errno(std::string("looking for ") + FILE_NAME);
    }
    if (!S_ISREG(status.st_mode)) throw Refusal("disk-unknown", std::string(FILE_NAME) + " is no plain file");
    return status.st_size > 0;  // of an empty one there is nothing to keep
}

}  // namespace

StoreFile open_store_file(const FileOptions& options) {
    StoreFile store{};
    store.geometry = geometry_of(options);
    store.directory = lock_directory(options.directory);
    const int directory = store.directory.get();
    store.created = !exists(directory);
    if (store.created) create(options, store.geometry, directory);
    const Named named{options, FILE_NAME};
    store.file = open_file(named, directory, store.direct);
    Superblock superblock{};
    const SuperblockFound found = read_superblock(store.file.get(), superblock, named.path());
    check_superblock(store.file.get(), found, superblock, named, store.created);
    resize(store.file.get(), store.geometry, named.path());
    store.store = superblock.store;
    return store;
}

}  // namespace kv::disk
