// The driver table and the kernels alone, on a real device or on the simulated driver: every byte compared.
//
//   driver_table cuda|rocm [--library PATH] [--rtc PATH] [--rates]
//
// Prints one JSON object a check; exits 1 at the first that fails. Built by tests/gpu/table.py; needs nothing else.

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/check.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/facts.h"
#include "gpu/driver/handles.h"
#include "gpu/kernels/kernels.h"

using namespace kv::gpu;

namespace {

constexpr uint64_t MIB = 1 << 20;
constexpr uint64_t SEGMENT_BYTES = 4 * MIB;
constexpr uint64_t POOL_BYTES = 3 * SEGMENT_BYTES;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A simulated device works on the same cores: only what is timed spins.
void wait(const Driver& driver, const Stream& stream, bool spins = false) {
    Event event(driver);
    event.record(stream);
    const double deadline = now_s() + 20;
    while (!event.done()) {
        if (now_s() > deadline) throw std::runtime_error("the stream did not end within 20 s");
        if (!spins) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

void require(bool truth, const std::string& what) {
    if (!truth) throw std::runtime_error(what);
}

// A device, its pool with a known pattern, a segment, and lists: what every check needs.
struct Bench {
    explicit Bench(const Driver& driver_)
        : driver(driver_),
          stream(driver_, true),
          pool(DeviceMemory::take(driver_, POOL_BYTES).value()),
          segment(DeviceMemory::take(driver_, SEGMENT_BYTES).value()),
          pattern(driver_, POOL_BYTES),
          seen(driver_, POOL_BYTES),
          list(driver_, PIECES_MAX * sizeof(Piece)) {
        std::mt19937_64 random(7);
        for (uint64_t at = 0; at < POOL_BYTES; at += 8) {
            const uint64_t word = random();
            std::memcpy(pattern.data() + at, &word, sizeof word);
        }
    }
    Piece* pieces() const { return reinterpret_cast<Piece*>(list.data()); }
    void fill(const DeviceMemory& memory, int byte) {
        std::memset(seen.data(), byte, memory.bytes());
        driver.copy(Way::TO_DEVICE, seen.data(), memory.address(), memory.bytes(), stream.get());
        wait(driver, stream);
    }
    void fetch(const DeviceMemory& memory) {
        std::memset(seen.data(), 0x33, memory.bytes());
        driver.copy(Way::TO_HOST, seen.data(), memory.address(), memory.bytes(), stream.get());
        wait(driver, stream);
    }
    void restore_pool() {
        driver.copy(Way::TO_DEVICE, pattern.data(), pool.address(), POOL_BYTES, stream.get());
        wait(driver, stream);
    }

    const Driver& driver;
    Stream stream;
    DeviceMemory pool;
    DeviceMemory segment;
    PinnedMemory pattern;
    PinnedMemory seen;
    PinnedMemory list;
};

// Every second page or so of the pool, `shift` bytes into it; staging is dense. Returns how many fit.
uint32_t pages(Bench& bench, unsigned page_bytes, unsigned shift, uint64_t most) {
    uint32_t count = 0;
    uint64_t pool = shift;
    for (uint64_t staging = shift; count < PIECES_MAX && count < most; ++count) {
        if (staging + page_bytes > SEGMENT_BYTES || pool + page_bytes > POOL_BYTES) break;
        bench.pieces()[count] = {bench.pool.address() + pool, static_cast<unsigned>(staging), page_bytes};
        staging += page_bytes;
        pool += page_bytes * (1 + count % 3);
    }
    return count;
}

void check_kernels(Bench& bench, const Kernels& kernels, unsigned page_bytes, unsigned shift) {
    bench.restore_pool();
    const uint32_t count = pages(bench, page_bytes, shift, PIECES_MAX);
    std::vector<std::byte> gathered(SEGMENT_BYTES, std::byte{0xee});
    std::vector<std::byte> scattered(POOL_BYTES, std::byte{0x77});
    for (uint32_t index = 0; index < count; ++index) {
        const Piece& piece = bench.pieces()[index];
        const uint64_t offset = piece.pool - bench.pool.address();
        std::memcpy(gathered.data() + piece.staging, bench.pattern.data() + offset, page_bytes);
        std::memcpy(scattered.data() + offset, bench.pattern.data() + offset, page_bytes);
    }
    bench.fill(bench.segment, 0xee);
    kernels.launch(Way::TO_HOST, bench.list.address(), count, bench.segment.address(), bench.stream);
    bench.fetch(bench.segment);
    require(std::memcmp(bench.seen.data(), gathered.data(), SEGMENT_BYTES) == 0,
            kv::format("gather of %u-byte pages at %u: bytes differ", page_bytes, shift));
    bench.fill(bench.pool, 0x77);
    kernels.launch(Way::TO_DEVICE, bench.list.address(), count, bench.segment.address(), bench.stream);
    bench.fetch(bench.pool);
    require(std::memcmp(bench.seen.data(), scattered.data(), POOL_BYTES) == 0,
            kv::format("scatter of %u-byte pages at %u: bytes differ", page_bytes, shift));
}

// Odd pieces in reverse order to `host` memory and back into a wiped pool.
void check_batch(Bench& bench, std::byte* host, Address host_address, uint64_t piece_bytes, size_t most) {
    bench.restore_pool();
    std::memset(host, 0, POOL_BYTES);
    const size_t count = std::min(most, static_cast<size_t>(POOL_BYTES / piece_bytes));
    std::vector<BatchCopy> copies;
    for (size_t index = 0; index < count; ++index) {
        const uint64_t there = index * piece_bytes;
        const uint64_t here = (count - 1 - index) * piece_bytes;
        copies.push_back({host_address + here, bench.pool.address() + there, piece_bytes});
    }
    bench.driver.copy_batch(Way::TO_HOST, copies, bench.stream.get());
    wait(bench.driver, bench.stream);
    for (size_t index = 0; index < count; ++index) {
        require(std::memcmp(host + (count - 1 - index) * piece_bytes, bench.pattern.data() + index * piece_bytes,
                            piece_bytes) == 0,
                kv::format("batch to host: piece %zu of %lu bytes differs", index, piece_bytes));
    }
    bench.fill(bench.pool, 0);
    bench.driver.copy_batch(Way::TO_DEVICE, copies, bench.stream.get());
    bench.fetch(bench.pool);
    require(std::memcmp(bench.seen.data(), bench.pattern.data(), count * piece_bytes) == 0,
            kv::format("batch to device: bytes of %lu-byte pieces differ", piece_bytes));
}

// A sealed-size memfd, as the arena is, made known to the driver.
void check_registered(Bench& bench) {
    if (!bench.driver.can_register()) return;
    const int fd = memfd_create("registered", MFD_CLOEXEC);
    require(fd >= 0 && ftruncate(fd, POOL_BYTES) == 0, "memfd");
    void* const memory = mmap(nullptr, POOL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    require(memory != MAP_FAILED, "mmap");
    bench.driver.host_register(memory, POOL_BYTES);
    check_batch(bench, static_cast<std::byte*>(memory), bench.driver.host_address(memory), 65536, 100);
    bench.driver.host_unregister(memory);
    munmap(memory, POOL_BYTES);
    close(fd);
}

double gbps(Bench& bench, uint64_t bytes, const std::function<void()>& enqueue) {
    enqueue();
    wait(bench.driver, bench.stream, /*spins=*/true);
    int rounds = 0;
    const double begin = now_s();
    while (now_s() - begin < 0.2) {
        for (int turn = 0; turn < 8; ++turn, ++rounds) enqueue();
        wait(bench.driver, bench.stream, /*spins=*/true);
    }
    return static_cast<double>(bytes) * rounds / (now_s() - begin) / 1e9;
}

void print_rates(Bench& bench, const Kernels& kernels) {
    const auto print = [](const std::string& what, uint64_t piece_bytes, double rate) {
        std::printf("{\"rate\": \"%s\", \"piece_bytes\": %lu, \"gbps\": %.1f}\n", what.c_str(), piece_bytes, rate);
    };
    print("contiguous to host", POOL_BYTES, gbps(bench, POOL_BYTES, [&] {
              bench.driver.copy(Way::TO_HOST, bench.seen.data(), bench.pool.address(), POOL_BYTES, bench.stream.get());
          }));
    print("contiguous to device", POOL_BYTES, gbps(bench, POOL_BYTES, [&] {
              bench.driver.copy(Way::TO_DEVICE, bench.seen.data(), bench.pool.address(), POOL_BYTES,
                                bench.stream.get());
          }));
    for (const unsigned page_bytes : {132u, 333u, 512u, 1024u, 2048u, 2112u, 4096u, 8192u}) {
        const uint32_t count = pages(bench, page_bytes, 0, PIECES_MAX);
        for (const auto way : {Way::TO_HOST, Way::TO_DEVICE}) {
            const uint64_t bytes = uint64_t{count} * page_bytes;
            print(way == Way::TO_HOST ? "gather" : "scatter", page_bytes, gbps(bench, bytes, [&] {
                      kernels.launch(way, bench.list.address(), count, bench.segment.address(), bench.stream);
                  }));
        }
    }
    for (const uint64_t piece_bytes : {uint64_t{4096}, uint64_t{32768}, uint64_t{262144}, MIB}) {
        std::vector<BatchCopy> copies;
        for (uint64_t at = 0; at + piece_bytes <= POOL_BYTES; at += piece_bytes) {
            copies.push_back(
                {bench.seen.address() + POOL_BYTES - piece_bytes - at, bench.pool.address() + at, piece_bytes});
        }
        const uint64_t bytes = copies.size() * piece_bytes;
        print("batch to host", piece_bytes,
              gbps(bench, bytes, [&] { bench.driver.copy_batch(Way::TO_HOST, copies, bench.stream.get()); }));
    }
}

struct Arguments {
    Vendor vendor;
    std::string library;
    std::string rtc;
    bool rates = false;
};

Arguments arguments_from(int count, char** words) {
    require(count > 1, "usage: driver_table cuda|rocm [--library PATH] [--rtc PATH] [--rates]");
    Arguments arguments{std::string(words[1]) == "rocm" ? Vendor::ROCM : Vendor::CUDA, "", ""};
    for (int index = 2; index < count; ++index) {
        const std::string word = words[index];
        if (word == "--rates") arguments.rates = true;
        if (word == "--library") arguments.library = words[++index];
        if (word == "--rtc") arguments.rtc = words[++index];
    }
    return arguments;
}

void run(const Arguments& arguments) {
    const Driver& driver = Driver::open(arguments.vendor, arguments.library);
    const DeviceFacts facts = facts_of(driver, 0);
    require(ordinal_of(driver, facts.id) == 0 && ordinal_of(driver, "none") == -1, "device by its id");
    std::printf(
        "{\"device\": \"%s\", \"name\": \"%s\", \"arch\": \"%s\", \"bytes\": %lu, \"library\": \"%s\", "
        "\"version\": %d, \"batch\": %s, \"missing\": %zu}\n",
        facts.id.c_str(), facts.name.c_str(), facts.arch.c_str(), facts.total_bytes, driver.library().c_str(),
        driver.version(), driver.has_batch() ? "true" : "false",
        probe(arguments.vendor, arguments.library).missing_optional.size());
    const Current current(driver, 0);
    driver.relax_capture_mode();
    Bench bench(driver);
    require(driver.address_range(bench.pool.address() + 4097).base == bench.pool.address(), "address range");
    require(driver.device_of(bench.pool.address()).value_or(0) == 0, "device of an address");

    for (const std::string& rtc : {arguments.rtc, std::string("/nonexistent/librtc.so")}) {
        const Kernels kernels(driver, 0, {rtc, ""});
        for (const unsigned page_bytes :
             {1u, 2u, 66u, 127u, 132u, 136u, 193u, 528u, 2048u, 2112u, 4096u, 8191u, 8192u}) {
            for (const unsigned shift : {0u, 1u, 2u, 4u, 8u, 16u}) check_kernels(bench, kernels, page_bytes, shift);
        }
        std::printf("{\"kernels\": \"%s\", \"bytes\": \"equal\", \"note\": \"%s\"}\n",
                    kernels.report().provider.c_str(), kernels.report().note.c_str());
        if (arguments.rates) print_rates(bench, kernels);
    }
    PinnedMemory host(driver, POOL_BYTES);
    check_batch(bench, host.data(), host.address(), 1000, 12001);  // more than a batch call takes
    check_batch(bench, host.data(), host.address(), 333333, 30);
    check_registered(bench);
    std::printf("{\"copies\": \"equal\", \"batch\": %s, \"registered\": %s}\n", driver.has_batch() ? "true" : "false",
                driver.can_register() ? "true" : "false");
}

}  // namespace

int main(int count, char** words) {
    try {
        run(arguments_from(count, words));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
