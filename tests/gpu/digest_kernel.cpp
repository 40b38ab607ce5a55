// The digest kernel on a real device or on the simulated driver: sums equal to a CPU's, every byte that it copies,
// planted errors, and its rate.
//
//   digest_kernel cuda|rocm [--library PATH] [--rtc PATH] [--rates MIB] [--rounds N]
//
// Prints one JSON object a line; exits 1 at the first check that fails. Built by tests/gpu/digest.py; needs nothing
// else.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
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
constexpr uint32_t PIECES_MAX = 1 << 15;
constexpr unsigned SUMS = 64;
constexpr unsigned PAYLOADS = 5;  // of one scene
constexpr double WAIT_S = 20;
constexpr double RUN_S = 0.03;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A simulated device works on the same cores: only what is timed spins.
void wait(const Driver& driver, const Stream& stream, bool spins = false) {
    Event event(driver);
    event.record(stream);
    const double deadline = now_s() + WAIT_S;
    while (!event.done()) {
        if (now_s() > deadline) throw std::runtime_error("the stream did not end in time");
        if (!spins) std::this_thread::sleep_for(std::chrono::microseconds(20));
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
    Bench(const Driver& driver_, uint64_t pool_bytes, uint64_t staging_bytes, uint64_t pieces_max)
        : driver(driver_),
          stream(driver_, true),
          pool(driver_, pool_bytes),
          staging(driver_, staging_bytes),
          columns(driver_, sizeof(kv::digest_columns())),
          rows(driver_, ROWS * sizeof(uint64_t)),
          shares(driver_, sizeof(uint64_t) + SUMS * sizeof(DigestShares)),
          reports(driver_, SUMS * sizeof(DigestReport)),
          list(driver_, pieces_max * sizeof(DigestPiece)) {
        for (const Mirrored* memory : {&pool, &staging}) {
            fill(memory->host, random);
            memory->send(driver, stream);
        }
        std::memset(shares.host.data(), 0, shares.host.bytes());
        shares.send(driver, stream);
        const auto b = kv::digest_columns();
        std::memcpy(columns.host.data(), b.data(), sizeof b);
        columns.send(driver, stream);
        const auto a = kv::digest_rows(ROWS);
        std::memcpy(rows.host.data(), a.data(), a.size() * sizeof a[0]);
        rows.send(driver, stream);
    }

    DigestPiece* pieces() const { return reinterpret_cast<DigestPiece*>(list.host.data()); }
    DigestTables tables() const { return {columns.device.address(), rows.device.address()}; }

    void enqueue(const Kernels& kernels, Address pieces, uint32_t count, unsigned sums = SUMS) {
        const Address counter = shares.device.address();
        kernels.digest(pieces, count, tables(), {counter + 8, counter, reports.address(), ++launches, sums}, stream);
    }

    // The sums of a launch, which must have reported no more than them, and left zeros behind.
    std::vector<DigestSum> run(const Kernels& kernels, uint32_t count, unsigned sums = SUMS) {
        std::memset(reports.data(), 0xee, reports.bytes());
        enqueue(kernels, list.host.address(), count, sums);
        shares.fetch(driver, stream);
        const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
        require(std::all_of(shares.host.data(), shares.host.data() + shares.host.bytes(), is_zero), "a number is left");
        std::vector<DigestSum> found;
        for (unsigned index = 0; index < SUMS; ++index) {
            DigestReport report;
            std::memcpy(&report, reports.data() + index * sizeof report, sizeof report);
            require((report.launch == launches) == (index < sums), "another launch's number");
            if (index < sums) found.push_back(digest_sum(report.shares));
        }
        return found;
    }

    const Driver& driver;
    std::mt19937_64 random{7};
    Stream stream;
    uint64_t launches = 0;
    Mirrored pool;
    Mirrored staging;
    Mirrored columns;
    Mirrored rows;
    Mirrored shares;  // behind the counter
    PinnedMemory reports;
    Mirrored list;
};

bool equal(const DigestSum& one, const DigestSum& other) { return one.sum == other.sum && one.bytes == other.bytes; }

enum class Pass { SUM, GATHER, SCATTER };

// Pages of the pool in random order, in turns of several payloads, each from a place of its own on. A scatter leaves
// some pieces in staging. Has what a CPU sums, and all bytes after the copies.
struct Scene {
    explicit Scene(const Bench& bench) {
        for (const Mirrored* memory : {&bench.pool, &bench.staging}) {
            after.emplace_back(memory->host.data(), memory->host.data() + memory->host.bytes());
        }
    }

    uint32_t pieces = 0;
    std::vector<DigestSum> sums = std::vector<DigestSum>(SUMS);
    std::vector<std::vector<std::byte>> after;  // of the pool, of staging
};

void add_page(Bench& bench, Scene& scene, Pass pass, uint64_t begin, uint64_t staged, uint64_t place,
              uint64_t page_bytes, unsigned index) {
    for (uint64_t at = 0; at < page_bytes; at += PIECE_BYTES_MAX) {
        const uint64_t bytes = std::min<uint64_t>(PIECE_BYTES_MAX, page_bytes - at);
        Address from = bench.pool.device.address() + begin + at, to = bench.staging.device.address() + staged + at;
        std::byte *read = &scene.after[0][begin + at], *written = &scene.after[1][staged + at];
        if (pass == Pass::SCATTER) std::swap(from, to), std::swap(read, written);
        const bool copies = pass == Pass::GATHER || (pass == Pass::SCATTER && bench.random() % 5 != 0);
        if (copies) std::memcpy(written, read, bytes);
        scene.sums[index] = scene.sums[index] + kv::digest_sum({read, bytes}, place + at);
        bench.pieces()[scene.pieces++] = {from, copies ? to : 0, static_cast<unsigned>(place + at),
                                          static_cast<unsigned short>(bytes), static_cast<unsigned short>(index)};
    }
}

Scene lay_out(Bench& bench, Pass pass, uint64_t page_bytes, uint64_t shift) {
    std::vector<uint64_t> pages((POOL_BYTES - 64) / page_bytes);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), bench.random);
    pages.resize(std::min<size_t>(pages.size(), 600));
    uint64_t places[PAYLOADS];
    for (unsigned index = 0; index < PAYLOADS; ++index) places[index] = index * index * 5 * page_bytes;
    Scene scene(bench);
    unsigned index = 0;
    uint64_t staged = std::array{0, 0, 16, 4, 1}[bench.random() % 5];
    for (const uint64_t page : pages) {
        if (bench.random() % 7 == 0) index = bench.random() % PAYLOADS;
        add_page(bench, scene, pass, shift + page * page_bytes, staged, places[index], page_bytes, index);
        places[index] += page_bytes;
        staged += page_bytes;
    }
    return scene;
}

// Two launches, of which the second one finds what the first one has left.
void check_sums(Bench& bench, const Kernels& kernels, Pass pass, uint64_t page_bytes, uint64_t shift) {
    const Scene scene = lay_out(bench, pass, page_bytes, shift);
    for (const int turn : {1, 2}) {
        const std::vector<DigestSum> found = bench.run(kernels, scene.pieces);
        for (unsigned index = 0; index < SUMS; ++index) {
            const DigestSum expected = scene.sums[index];
            require(equal(found[index], expected),
                    kv::format("pages of %lu bytes at %lu, sum %u, launch %d: %lx of %lu bytes; expected %lx of %lu",
                               page_bytes, shift, index, turn, found[index].sum, found[index].bytes, expected.sum,
                               expected.bytes));
        }
    }
    const Mirrored* const memories[] = {&bench.pool, &bench.staging};
    for (int memory = 0; memory < 2; ++memory) {
        memories[memory]->fetch(bench.driver, bench.stream);
        const std::vector<std::byte>& expected = scene.after[memory];
        require(std::equal(expected.begin(), expected.end(), memories[memory]->host.data()),
                kv::format("pages of %lu bytes at %lu: other bytes in %s", page_bytes, shift,
                           memory == 0 ? "the pool" : "staging"));
    }
}

// Few pieces, of which most crews have none, and few sums.
void check_few(Bench& bench, const Kernels& kernels) {
    const Scene scene = lay_out(bench, Pass::GATHER, 2048, 0);
    for (const unsigned pieces : {0, 1, 33}) {
        for (const unsigned sums : {0u, PAYLOADS, SUMS}) {
            if (pieces > 0 && sums < PAYLOADS) continue;
            uint64_t bytes = 0;
            for (const DigestSum& sum : bench.run(kernels, pieces, sums)) bytes += sum.bytes;
            require(bytes == pieces * 2048, kv::format("%lu bytes of %u pieces", bytes, pieces));
        }
    }
    bench.staging.fetch(bench.driver, bench.stream);
}

// So many pieces that a crew has several of the same row, of the largest words, in three payloads. The pool has no
// other.
void check_neighbours(Bench& bench, const Kernels& kernels) {
    constexpr uint32_t COUNT = PIECES_MAX - 5;
    const std::vector<std::byte> words(COUNT * uint64_t{2048}, std::byte{0xff});
    for (const uint64_t bytes : {1, 4, 16, 496, 512, 528, 2048}) {
        std::vector<DigestSum> expected(3);
        for (uint32_t index = 0; index < COUNT; ++index) {
            const auto sum = static_cast<unsigned short>(index / (COUNT / 3 + 1));
            const Address from = bench.pool.device.address() + index * bytes % MIB;
            bench.pieces()[index] = {from, 0, static_cast<unsigned>(index * bytes), static_cast<unsigned short>(bytes),
                                     sum};
            if (index == 0 || sum != bench.pieces()[index - 1].sum) {
                const uint64_t pieces = std::min(COUNT - index, COUNT / 3 + 1);
                expected[sum] = kv::digest_sum({words.data(), pieces * bytes}, index * bytes);
            }
        }
        const std::vector<DigestSum> found = bench.run(kernels, COUNT);
        require(std::equal(expected.begin(), expected.end(), found.begin(), equal),
                kv::format("neighbours of %lu bytes differ", bytes));
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
            bench.pieces()[count++] = {bench.pool.device.address() + at, 0, static_cast<unsigned>(place + at),
                                       static_cast<unsigned short>(bytes), 1};
        }
        const DigestSum expected = kv::digest_sum({bench.pool.host.data(), POOL_BYTES}, place);
        require(equal(bench.run(kernels, count)[1], expected), kv::format("bytes of 255 at %lu differ", place));
    }
    check_neighbours(bench, kernels);
    std::memcpy(bench.pool.host.data(), before.data(), POOL_BYTES);
    bench.pool.send(bench.driver, bench.stream);
}

// One flipped bit, two pages that changed places, a page of zeros: in the device's memory alone.
void check_planted(Bench& bench, const Kernels& kernels, uint64_t page_bytes) {
    const Scene scene = lay_out(bench, Pass::SUM, page_bytes, 0);
    const std::vector<std::byte> right(bench.pool.host.data(), bench.pool.host.data() + POOL_BYTES);
    std::byte* const memory = bench.pool.host.data();
    const uint64_t first = bench.pieces()[0].from - bench.pool.device.address();
    const uint64_t second = bench.pieces()[scene.pieces / 2].from - bench.pool.device.address();
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
    wait(bench.driver, bench.stream, /*spins=*/true);
    int launches = 0;
    const double begin = now_s();
    do {
        for (int turn = 0; turn < 16; ++turn, ++launches) enqueue();
        wait(bench.driver, bench.stream, /*spins=*/true);
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

// Lists pages for the kernels without and with sums; returns how many pieces and bytes.
std::pair<uint32_t, uint64_t> list_pages(Bench& bench, Piece* copies, Pass pass, uint64_t page_bytes) {
    std::vector<uint64_t> pages(bench.pool.host.bytes() / page_bytes);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), bench.random);
    uint32_t count = 0;
    uint64_t end = 0;
    for (size_t page = 0; page < pages.size() / 2; ++page) {
        for (uint64_t at = 0; at < page_bytes; at += PIECE_BYTES_MAX) {
            const auto bytes = static_cast<unsigned>(std::min<uint64_t>(PIECE_BYTES_MAX, page_bytes - at));
            const Address pool = bench.pool.device.address() + pages[page] * page_bytes + at;
            const Address staged = bench.staging.device.address() + end;
            copies[count] = {pool, static_cast<unsigned>(end), bytes};
            bench.pieces()[count++] = {pass == Pass::SCATTER ? staged : pool,
                                       pass == Pass::SCATTER  ? pool
                                       : pass == Pass::GATHER ? staged
                                                              : 0,
                                       static_cast<unsigned>(end), static_cast<unsigned short>(bytes), 0};
            end += bytes;
        }
    }
    // As for the chunks of a job: few crews add to the same numbers.
    for (uint32_t index = 0; index < count; ++index) {
        bench.pieces()[index].sum = static_cast<unsigned short>(uint64_t{index} * SUMS / count);
    }
    return {count, end};
}

// Random pages of a pool of twice their bytes: copied, and copied and summed, or summed alone. The lists of pieces lie
// in host memory, as the client's do, and then on the device.
void print_rates(const Driver& driver, const Kernels& kernels, uint64_t bytes, int rounds) {
    struct Named {
        Pass pass;
        const char* alone;
        const char* summed;
    };
    Bench bench(driver, 2 * bytes, bytes, bytes / 2048);
    const Mirrored copy_list(driver, bytes / 2048 * sizeof(Piece));
    auto* const copies = reinterpret_cast<Piece*>(copy_list.host.data());
    for (const uint64_t page_bytes : {2048, 4096, 18432, 32768, 131072}) {
        for (const Named& named : {Named{Pass::GATHER, "gather", "gather and sum"},
                                   Named{Pass::SCATTER, "scatter", "scatter and sum"}, Named{Pass::SUM, "", "sum"}}) {
            const auto [count, end] = list_pages(bench, copies, named.pass, page_bytes);
            copy_list.send(driver, bench.stream);
            bench.list.send(driver, bench.stream);
            for (const bool on_device : {false, true}) {
                const char* const list = on_device ? "device" : "host";
                const Way way = named.pass == Pass::GATHER ? Way::TO_HOST : Way::TO_DEVICE;
                std::vector<double> alone, summed;
                for (int round = 0; round < rounds; ++round) {
                    alone.push_back(named.pass == Pass::SUM ? 0 : run_us(bench, [&, count = count] {
                        const Mirrored& from = copy_list;
                        kernels.launch(way, on_device ? from.device.address() : from.host.address(), count,
                                       bench.staging.device.address(), bench.stream);
                    }));
                    summed.push_back(run_us(bench, [&, count = count] {
                        const Mirrored& from = bench.list;
                        bench.enqueue(kernels, on_device ? from.device.address() : from.host.address(), count);
                    }));
                }
                if (named.pass != Pass::SUM) print_rate(named.alone, list, page_bytes, end, alone);
                print_rate(named.summed, list, page_bytes, end, summed);
            }
        }
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
    Bench bench(driver, POOL_BYTES, POOL_BYTES, PIECES_MAX);
    for (const std::string& rtc : {arguments.rtc, std::string("/nonexistent/librtc.so")}) {
        const Kernels kernels(driver, 0, {rtc, ""});
        int scenes = 0;
        for (const uint64_t page_bytes : {1,    2,    3,    4,    66,   127,   132,   193,   528,    2048,
                                          2112, 4095, 4096, 4097, 8191, 18432, 32768, 65536, 131072, 131088}) {
            for (const uint64_t shift : {0, 1, 4, 16, 48}) {
                for (const Pass pass : {Pass::SUM, Pass::GATHER, Pass::SCATTER}) {
                    check_sums(bench, kernels, pass, page_bytes, shift);
                    ++scenes;
                }
            }
        }
        check_few(bench, kernels);
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
