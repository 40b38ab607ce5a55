// Modules and kernels: code objects are only looked at, the functions are the kernels' source as a host loop.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>
#include <set>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

// A piece that touches what it must not; ends the kernel.
struct Illegal {};

thread_local int running_device = -1;

unsigned long long resolve(unsigned long long address, unsigned bytes) {
    std::byte* host = at(address, bytes, running_device);
    if (!host) throw Illegal{};
    return reinterpret_cast<unsigned long long>(host);
}

}  // namespace
}  // namespace sim

#define KV_RESOLVE(address, bytes, writes) sim::resolve(address, bytes)
#include "gpu/kernels/kernel_source.h"

namespace sim {
namespace {

constexpr char CODE_MAGIC[] = "KVSIM ";  // then the architecture, a line's end and the source's size
constexpr char BUNDLE_MAGIC[] = "__CLANG_OFFLOAD_BUNDLE__";

struct Named {
    const char* name;
    Kernel kernel;
};
Named functions[] = {{"kv_gather", Kernel::GATHER}, {"kv_scatter", Kernel::SCATTER}, {"kv_digest", Kernel::DIGEST}};

template <typename Value>
void take(Value& value, const void* argument) {
    std::memcpy(&value, argument, sizeof value);
}

std::mutex modules_lock;
std::set<void*>& modules() {
    static auto* all = new std::set<void*>;
    return *all;
}

bool begins_with(const void* image, const char* text) {
    return std::strncmp(static_cast<const char*>(image), text, std::strlen(text)) == 0;
}

// Whether one of a bundle's objects is for that architecture. After the magic: how many, then offset, size and the
// length of its name before each name.
bool bundle_has(const void* image, const std::string& arch) {
    const auto* at = static_cast<const char*>(image) + std::strlen(BUNDLE_MAGIC);
    uint64_t count;
    std::memcpy(&count, at, sizeof count);
    at += sizeof count;
    for (uint64_t index = 0; index < count; index++) {
        uint64_t name_bytes;
        std::memcpy(&name_bytes, at + 2 * sizeof name_bytes, sizeof name_bytes);
        at += 3 * sizeof name_bytes;
        if (std::string(at, name_bytes) == "hipv4-amdgcn-amd-amdhsa--" + arch) return true;
        at += name_bytes;
    }
    return false;
}

int check_image(const void* image) {
    const auto* text = static_cast<const char*>(image);
    const std::string arch = state().devices[current_device()].arch;
    if (begins_with(image, CODE_MAGIC)) {
        return begins_with(text + std::strlen(CODE_MAGIC), (arch + "\n").c_str()) ? SUCCESS : NO_BINARY;
    }
    if (HIP && begins_with(image, BUNDLE_MAGIC)) return bundle_has(image, arch) ? SUCCESS : NO_BINARY;
    return !HIP && std::strstr(text, ".entry kv_gather") ? SUCCESS : INVALID_IMAGE;
}

}  // namespace

std::string code_for(const std::string& arch, const std::string& source) {
    return CODE_MAGIC + arch + "\n" + std::to_string(source.size());
}

int module_load(void** module, const void* image) {
    if (const int code = check_image(image)) return code;
    const std::lock_guard lock(modules_lock);
    *module = new char;
    modules().insert(*module);
    return SUCCESS;
}

int module_unload(void* module) {
    const std::lock_guard lock(modules_lock);
    if (modules().erase(module) == 0) return INVALID_HANDLE;
    delete static_cast<char*>(module);
    return SUCCESS;
}

int module_function(void** function, void* module, const char* name) {
    const std::lock_guard lock(modules_lock);
    if (!modules().contains(module)) return INVALID_HANDLE;
    for (Named& known : functions) {
        if (std::strcmp(name, known.name) != 0) continue;
        *function = &known;
        return SUCCESS;
    }
    return NOT_FOUND;
}

bool read_launch(void* function, void** arguments, Launch& launch) {
    const auto known =
        std::find_if(std::begin(functions), std::end(functions), [&](Named& one) { return &one == function; });
    if (known == std::end(functions)) return false;
    launch = {};
    launch.kernel = known->kernel;
    take(launch.pieces, arguments[0]);
    take(launch.count, arguments[1]);
    if (known->kernel == Kernel::DIGEST) {
        take(launch.columns, arguments[2]);
        take(launch.rows, arguments[3]);
        take(launch.totals, arguments[4]);
        take(launch.crews, arguments[5]);
    } else {
        take(launch.segment, arguments[2]);
        take(launch.crews, arguments[3]);
    }
    return true;
}

using namespace kv::gpu;

// The address of a byte that a kernel with these pieces copies; a kernel that copies nothing reports wrongly instead.
static Address copied_by(const Launch& launch, const std::byte* pieces) {
    const auto& first = *reinterpret_cast<const Piece*>(pieces);
    switch (launch.kernel) {
        case Kernel::GATHER:
            return launch.segment + first.staging;
        case Kernel::SCATTER:
            return first.pool;
        case Kernel::DIGEST:
            break;
    }
    const Address to = reinterpret_cast<const DigestPiece*>(pieces)->to;
    return to != 0 ? to : launch.totals.reports;
}

static void run_digest(const Launch& launch, const std::byte* pieces) {
    const auto columns = reinterpret_cast<Word64>(resolve(launch.columns, 2 * ROW_BYTES));
    kv_digest(reinterpret_cast<const DigestPiece*>(pieces), launch.count, columns, launch.rows, launch.totals,
              launch.crews);
}

// Those that are there keep their bytes.
static void run_silent_digest(const Launch& launch, const std::byte* pieces) {
    const auto bytes = static_cast<unsigned>(launch.totals.sums * sizeof(DigestReport));
    auto* const reports = reinterpret_cast<std::byte*>(resolve(launch.totals.reports, bytes));
    const std::vector<std::byte> before(reports, reports + bytes);
    run_digest(launch, pieces);
    std::copy(before.begin(), before.end(), reports);
}

static void flip(Address address) { *reinterpret_cast<std::byte*>(resolve(address, 1)) ^= std::byte{1}; }

int run_kernel(const Launch& launch, int device, const Mistakes& mistakes) {
    running_device = device;
    const uint64_t piece_bytes = launch.kernel == Kernel::DIGEST ? sizeof(DigestPiece) : sizeof(Piece);
    const std::byte* pieces = at(launch.pieces, launch.count * piece_bytes, device);
    if (!pieces) return ILLEGAL_ADDRESS;
    try {
        if (launch.kernel == Kernel::DIGEST) {
            (mistakes.silent ? run_silent_digest : run_digest)(launch, pieces);
        } else {
            const auto* list = reinterpret_cast<const Piece*>(pieces);
            (launch.kernel == Kernel::GATHER ? kv_gather : kv_scatter)(list, launch.count, launch.segment,
                                                                       launch.crews);
        }
        if (mistakes.copy) flip(copied_by(launch, pieces));
        if (mistakes.report) flip(launch.totals.reports);
    } catch (const Illegal&) {
        return ILLEGAL_ADDRESS;
    }
    return SUCCESS;
}

}  // namespace sim
