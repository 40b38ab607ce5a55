// The digest kernel on a real device or on the simulated driver: sums equal to a CPU's, planted errors, and its rate.
//
//   digest_kernel cuda|rocm [--library PATH] [--rtc PATH] [--rates MIB] [--rounds N]
//
// Prints one JSON object a line; exits 1 at the first check that fails. Built by tests/gpu/digest.py; needs nothing
// else.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/digest.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/facts.h"
#include "gpu/driver/handles.h"
#include "gpu/kernels/kernels.h"

using namespace kv::gpu;
using kv::DigestSum;

namespace {

constexpr uint64_t MIB = 1 << 20;
constexpr uint64_t POOL_BYTES = 2 * MIB + 96;
constexpr uint64_t ROWS = 1 << 15;  // of payloads up to 128 MiB
constexpr unsigned SUMS = 64;
constexpr unsigned PAYLOADS = 5;  // of one scene
constexpr double WAIT_S = 20;
constexpr double RUN_S = 0.03;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void wait(const Driver& driver, const Stream& stream) {
    Event event(driver);
    event.record(stream);
    const double deadline = now_s() + WAIT_S;
    while (!event.done()) {
        if (now_s() > deadline) throw std::runtime_error("the stream did not end in time");
        std::this_thread::yield();
    }
}

void require(bool truth, const std::string& what) {
    if (!truth) throw std::runtime_error(what);
}

// Device memory with the host memory that it is filled from, or read into.
struct Mirrored {
    Mirrored(const Driver& driver, uint64_t bytes)
        : host(driver, bytes), device(DeviceMemory::take(driver, bytes).value()) {}

    void send(const Driver& driver, const Stream& stream) const {
        driver.copy(Way::TO_DEVICE, host.data(), device.address(), host.bytes(), stream.get());
        wait(driver, stream);
    }
    void fetch(const Driver& driver, const Stream& stream) const {
        driver.copy(Way::TO_HOST, host.data(), device.address(), host.bytes(), stream.get());
        wait(driver, stream);
    }

    PinnedMemory host;
    DeviceMemory device;
};

void fill(const PinnedMemory& memory, std::mt19937_64& random) {
    for (uint64_t at = 0; at < memory.bytes(); at += 8) {
        const uint64_t word = random();
        std::memcpy(memory.data() + at, &word, std::min<uint64_t>(sizeof word, memory.bytes() - at));
    }
}

struct Bench {
    Bench(const Driver& driver_, uint64_t pool_bytes, uint64_t pieces_max)
        : driver(driver_),
          stream(driver_, true),
          pool(driver_, pool_bytes),
          columns(driver_, sizeof(kv::digest_columns())),
          rows(driver_, ROWS * sizeof(uint64_t)),
          sums(driver_, SUMS * sizeof(DigestShares)),
          list(driver_, pieces_max * sizeof(DigestPiece)) {
        fill(pool.host, random);
        pool.send(driver, stream);
        const auto b = kv::digest_columns();
        std::memcpy(columns.host.data(), b.data(), sizeof b);
        columns.send(driver, stream);
        const auto a = kv::digest_rows(ROWS);
        std::memcpy(rows.host.data(), a.data(), a.size() * sizeof a[0]);
        rows.send(driver, stream);
    }

    DigestPiece* pieces() const { return reinterpret_cast<DigestPiece*>(list.host.data()); }
    DigestTables tables() const { return {columns.device.address(), rows.device.address()}; }

    // The sums after `turns` launches.
    std::vector<DigestSum> run(const Kernels& kernels, uint32_t count, int turns = 1) {
        std::memset(sums.host.data(), 0, sums.host.bytes());
        sums.send(driver, stream);
        for (int turn = 0; turn < turns; ++turn) {
            kernels.digest(list.host.address(), count, tables(), sums.device.address(), stream);
        }
        sums.fetch(driver, stream);
        std::vector<DigestSum> found;
        for (unsigned index = 0; index < SUMS; ++index) {
            DigestShares shares;
            std::memcpy(&shares, sums.host.data() + index * sizeof shares, sizeof shares);
            found.push_back(digest_sum(shares));
        }
        return found;
    }

    const Driver& driver;
    std::mt19937_64 random{7};
    Stream stream;
    Mirrored pool;
    Mirrored columns;
    Mirrored rows;
    Mirrored sums;
    Mirrored list;
};

bool equal(const DigestSum& one, const DigestSum& other) { return one.sum == other.sum && one.bytes == other.bytes; }

// Pages of the pool in random order, in turns of several payloads, each from a place of its own on. Returns the number
// of pieces, and what a CPU sums.
struct Scene {
    uint32_t pieces = 0;
    std::vector<DigestSum> sums = std::vector<DigestSum>(SUMS);
};

Scene lay_out(Bench& bench, uint64_t page_bytes, uint64_t shift) {
    std::vector<uint64_t> pages((POOL_BYTES - 64) / page_bytes);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), bench.random);
    pages.resize(std::min<size_t>(pages.size(), 600));
    uint64_t places[PAYLOADS];
    for (unsigned index = 0; index < PAYLOADS; ++index) places[index] = index * index * 5 * page_bytes;
    Scene scene;
    unsigned index = 0;
    for (const uint64_t page : pages) {
        if (bench.random() % 7 == 0) index = bench.random() % PAYLOADS;
        const uint64_t begin = shift + page * page_bytes;
        const DigestSum share = kv::digest_sum({bench.pool.host.data() + begin, page_bytes}, places[index]);
        scene.sums[index] = scene.sums[index] + share;
        for (uint64_t at = 0; at < page_bytes; at += PIECE_BYTES_MAX) {
            const uint64_t bytes = std::min<uint64_t>(PIECE_BYTES_MAX, page_bytes - at);
            bench.pieces()[scene.pieces++] = {bench.pool.device.address() + begin + at,
                                              static_cast<unsigned>(places[index] + at),
                                              static_cast<unsigned short>(bytes), static_cast<unsigned short>(index)};
        }
        places[index] += page_bytes;
    }
    return scene;
}

void check_sums(Bench& bench, const Kernels& kernels, uint64_t page_bytes, uint64_t shift) {
    const Scene scene = lay_out(bench, page_bytes, shift);
    for (const int turns : {1, 2}) {
        const std::vector<DigestSum> found = bench.run(kernels, scene.pieces, turns);
        for (unsigned index = 0; index < SUMS; ++index) {
            const DigestSum expected = turns == 1 ? scene.sums[index] : scene.sums[index] + scene.sums[index];
            require(equal(found[index], expected),
                    kv::format("pages of %lu bytes at %lu, sum %u, %d launches: %lx of %lu bytes; expected %lx of %lu",
                               page_bytes, shift, index, turns, found[index].sum, found[index].bytes, expected.sum,
                               expected.bytes));
        }
    }
}

// A whole pool as one payload of the largest words, from a place that is in no row's beginning.
void check_largest(Bench& bench, const Kernels& kernels) {
    std::vector<std::byte> before(bench.pool.host.data(), bench.pool.host.data() + POOL_BYTES);
    std::memset(bench.pool.host.data(), 0xff, POOL_BYTES);
    bench.pool.send(bench.driver, bench.stream);
    for (const uint64_t place : {uint64_t{0}, uint64_t{48}, uint64_t{4092}, ROWS * kv::DIGEST_ROW_BYTES - POOL_BYTES}) {
        uint32_t count = 0;
        for (uint64_t at = 0; at < POOL_BYTES; at += PIECE_BYTES_MAX) {
            const uint64_t bytes = std::min<uint64_t>(PIECE_BYTES_MAX, POOL_BYTES - at);
            bench.pieces()[count++] = {bench.pool.device.address() + at, static_cast<unsigned>(place + at),
                                       static_cast<unsigned short>(bytes), 1};
        }
        const DigestSum expected = kv::digest_sum({bench.pool.host.data(), POOL_BYTES}, place);
        require(equal(bench.run(kernels, count)[1], expected), kv::format("bytes of 255 at %lu differ", place));
    }
    std::memcpy(bench.pool.host.data(), before.data(), POOL_BYTES);
    bench.pool.send(bench.driver, bench.stream);
}

// One flipped bit, two pages that changed places, a page of zeros: in the device's memory alone.
void check_planted(Bench& bench, const Kernels& kernels, uint64_t page_bytes) {
    const Scene scene = lay_out(bench, page_bytes, 0);
    const std::vector<std::byte> right(bench.pool.host.data(), bench.pool.host.data() + POOL_BYTES);
    std::byte* const memory = bench.pool.host.data();
    const uint64_t first = bench.pieces()[0].pool - bench.pool.device.address();
    const uint64_t second = bench.pieces()[scene.pieces / 2].pool - bench.pool.device.address();
    const uint64_t bytes = std::min<uint64_t>(page_bytes, PIECE_BYTES_MAX / 2);
    const std::function<void()> errors[] = {
        [&] { memory[first + bench.random() % bytes] ^= static_cast<std::byte>(1 << bench.random() % 8); },
        [&] { std::swap_ranges(memory + first, memory + first + bytes, memory + second); },
        [&] { std::memset(memory + second, 0, bytes); },
    };
    for (const auto& plant : errors) {
        for (int turn = 0; turn < 8; ++turn) {
            plant();
            bench.pool.send(bench.driver, bench.stream);
            const std::vector<DigestSum> found = bench.run(kernels, scene.pieces);
            require(!std::equal(found.begin(), found.end(), scene.sums.begin(), equal),
                    "a planted error is not noticed");
            std::memcpy(memory, right.data(), POOL_BYTES);
        }
    }
    bench.pool.send(bench.driver, bench.stream);
    const std::vector<DigestSum> found = bench.run(kernels, scene.pieces);
    require(std::equal(found.begin(), found.end(), scene.sums.begin(), equal), "the right bytes are not right again");
}

// ---------------------------------------------------------------- rates

double run_us(const Bench& bench, const std::function<void()>& enqueue) {
    enqueue();
    wait(bench.driver, bench.stream);
    int launches = 0;
    const double begin = now_s();
    do {
        for (int turn = 0; turn < 16; ++turn, ++launches) enqueue();
        wait(bench.driver, bench.stream);
    } while (now_s() - begin < RUN_S);
    return (now_s() - begin) / launches * 1e6;
}

void print_rate(const std::string& what, const char* list, uint64_t page_bytes, uint64_t bytes,
                std::vector<double> us) {
    std::sort(us.begin(), us.end());
    const double median = us[us.size() / 2];
    std::printf(
        "{\"rate\": \"%s\", \"list\": \"%s\", \"page_bytes\": %lu, \"us\": %.1f, \"us_min\": %.1f, \"us_max\": %.1f, "
        "\"gbps\": %.0f, \"runs\": %zu}\n",
        what.c_str(), list, page_bytes, median, us.front(), us.back(), static_cast<double>(bytes) / median / 1e3,
        us.size());
}

// Random pages of a pool of twice their bytes: gathered, summed, and first one and then the other. The lists of pieces
// lie in host memory, as the client's do, and then on the device.
void print_rates(const Driver& driver, const Kernels& kernels, uint64_t bytes, int rounds) {
    Bench bench(driver, 2 * bytes, bytes / 2048);
    const Mirrored gather_list(driver, bytes / 2048 * sizeof(Piece));
    const DeviceMemory staging = DeviceMemory::take(driver, bytes).value();
    auto* const gathers = reinterpret_cast<Piece*>(gather_list.host.data());
    for (const uint64_t page_bytes : {2048, 4096, 18432, 32768, 131072}) {
        std::vector<uint64_t> pages(2 * bytes / page_bytes);
        std::iota(pages.begin(), pages.end(), 0);
        std::shuffle(pages.begin(), pages.end(), bench.random);
        uint32_t count = 0;
        uint64_t end = 0;
        for (size_t page = 0; page < pages.size() / 2; ++page) {
            for (uint64_t at = 0; at < page_bytes; at += PIECE_BYTES_MAX) {
                const auto piece_bytes = static_cast<unsigned>(std::min<uint64_t>(PIECE_BYTES_MAX, page_bytes - at));
                const Address from = bench.pool.device.address() + pages[page] * page_bytes + at;
                gathers[count] = {from, static_cast<unsigned>(end), piece_bytes};
                bench.pieces()[count++] = {from, static_cast<unsigned>(end), static_cast<unsigned short>(piece_bytes),
                                           0};
                end += piece_bytes;
            }
        }
        gather_list.send(driver, bench.stream);
        bench.list.send(driver, bench.stream);
        for (const bool on_device : {false, true}) {
            const auto gather = [&] {
                const Address list = on_device ? gather_list.device.address() : gather_list.host.address();
                kernels.launch(Way::TO_HOST, list, count, staging.address(), bench.stream);
            };
            const auto digest = [&] {
                const Address list = on_device ? bench.list.device.address() : bench.list.host.address();
                kernels.digest(list, count, bench.tables(), bench.sums.device.address(), bench.stream);
            };
            std::vector<double> alone, summed, both;
            for (int round = 0; round < rounds; ++round) {
                alone.push_back(run_us(bench, gather));
                summed.push_back(run_us(bench, digest));
                both.push_back(run_us(bench, [&] {
                    gather();
                    digest();
                }));
            }
            const char* const list = on_device ? "device" : "host";
            print_rate("gather", list, page_bytes, end, alone);
            print_rate("digest", list, page_bytes, end, summed);
            print_rate("gather, digest", list, page_bytes, end, both);
        }
        // As for the chunks of a job: few crews add to the same numbers.
        for (uint32_t index = 0; index < count; ++index) {
            bench.pieces()[index].sum = static_cast<unsigned short>(uint64_t{index} * SUMS / count);
        }
        bench.list.send(driver, bench.stream);
        std::vector<double> spread;
        for (int round = 0; round < rounds; ++round) {
            spread.push_back(run_us(bench, [&] {
                kernels.digest(bench.list.device.address(), count, bench.tables(), bench.sums.device.address(),
                               bench.stream);
            }));
        }
        print_rate("digest, 64 sums", "device", page_bytes, end, spread);
        std::fflush(stdout);
    }
}

struct Arguments {
    Vendor vendor;
    std::string library;
    std::string rtc;
    uint64_t rates_mib = 0;
    int rounds = 7;
};

Arguments arguments_from(int count, char** words) {
    require(count > 1, "usage: digest_kernel cuda|rocm [--library PATH] [--rtc PATH] [--rates MIB] [--rounds N]");
    Arguments arguments{std::string(words[1]) == "rocm" ? Vendor::ROCM : Vendor::CUDA, "", ""};
    for (int index = 2; index + 1 < count; index += 2) {
        const std::string word = words[index];
        if (word == "--library") arguments.library = words[index + 1];
        if (word == "--rtc") arguments.rtc = words[index + 1];
        if (word == "--rates") arguments.rates_mib = std::stoul(words[index + 1]);
        if (word == "--rounds") arguments.rounds = std::stoi(words[index + 1]);
    }
    return arguments;
}

void run(const Arguments& arguments) {
    const Driver& driver = Driver::open(arguments.vendor, arguments.library);
    const DeviceFacts facts = facts_of(driver, 0);
    std::printf("{\"name\": \"%s\", \"arch\": \"%s\", \"version\": %d}\n", facts.name.c_str(), facts.arch.c_str(),
                driver.version());
    const Current current(driver, 0);
    Bench bench(driver, POOL_BYTES, 1 << 15);
    for (const std::string& rtc : {arguments.rtc, std::string("/nonexistent/librtc.so")}) {
        const Kernels kernels(driver, 0, {rtc, ""});
        int scenes = 0;
        for (const uint64_t page_bytes : {1,    2,    3,    4,    66,   127,   132,   193,   528,    2048,
                                          2112, 4095, 4096, 4097, 8191, 18432, 32768, 65536, 131072, 131088}) {
            for (const uint64_t shift : {0, 1, 4, 16, 48}) {
                check_sums(bench, kernels, page_bytes, shift);
                ++scenes;
            }
        }
        check_largest(bench, kernels);
        for (const uint64_t page_bytes : {66, 2048, 32768}) check_planted(bench, kernels, page_bytes);
        std::printf("{\"kernels\": \"%s\", \"sums\": \"equal\", \"scenes\": %d, \"planted\": 72, \"note\": \"%s\"}\n",
                    kernels.report().provider.c_str(), scenes, kernels.report().note.c_str());
        std::fflush(stdout);
        if (arguments.rates_mib > 0) print_rates(driver, kernels, arguments.rates_mib * MIB, arguments.rounds);
    }
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
