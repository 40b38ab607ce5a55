#include "gpu/kernels/kernels.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "gpu/kernels/code_cache.h"
#include "gpu/kernels/objects.h"
#include "gpu/kernels/rtc.h"

namespace kv::gpu {
namespace {

// So many that each crew has a piece, but no more than these.
unsigned blocks_for(uint32_t count, unsigned threads, unsigned blocks_max) {
    const unsigned crews = threads / CREW_LANES;
    return std::min(blocks_max, (count + crews - 1) / crews);
}

std::string cache_key(const Rtc& rtc, const std::string& arch) {
    std::string key = rtc.name() + "\n" + arch + "\n";
    for (const std::string& option : rtc.options(arch)) key += option + "\n";
    return key + std::string(piece_header()) + std::string(kernel_source());
}

// Loads cached code. nullopt: it was cached under another driver, and this one does not accept it.
std::optional<Module> loaded(const Driver& driver, const std::vector<char>& code) {
    try {
        return Module(driver, code.data());
    } catch (const DriverError&) {
        return std::nullopt;
    }
}

// Compiles for exactly this device, or takes the code of an earlier start. RtcError or DriverError when both fail.
Module compiled(const Driver& driver, const Rtc& rtc, const std::string& arch, const std::string& cache_dir) {
    const std::string key = cache_key(rtc, arch);
    if (const auto kept = find_code(cache_dir, key)) {
        if (auto module = loaded(driver, *kept)) return std::move(*module);
    }
    const std::vector<char> code = rtc.compile(arch);
    Module module(driver, code.data());
    keep_code(cache_dir, key, code);
    return module;
}

}  // namespace

DigestSum digest_sum(const DigestShares& shares) {
    const unsigned __int128 sum = (static_cast<unsigned __int128>(shares.high) << DIGEST_LOW_BITS) + shares.low;
    return {static_cast<uint64_t>(sum % DIGEST_PRIME), shares.bytes};
}

Kernels::Kernels(const Driver& driver, int ordinal, const KernelOptions& options)
    : driver_(driver),
      multiprocessors_(static_cast<unsigned>(driver.multiprocessors(ordinal))),
      report_{"", driver.arch(ordinal), ""},
      module_(load(options)),
      gather_(module_.function("kv_gather")),
      scatter_(module_.function("kv_scatter")),
      digest_(module_.function("kv_digest")) {}

Module Kernels::load(const KernelOptions& options) {
    try {
        if (report_.arch.empty()) throw RtcError("the device's architecture is unknown");
        const Rtc rtc(driver_, options.rtc_library);
        report_.provider = rtc.name();
        return compiled(driver_, rtc, report_.arch, options.cache_dir);
    } catch (const RtcError& error) {
        report_.note = error.what();
    } catch (const DriverError& error) {
        report_.note = report_.provider + " made code that the driver does not load: " + error.what();
    }
    const std::optional<BuiltIn> object = built_in(driver_.vendor(), report_.arch);
    if (!object) throw Refusal("kernels", "no built-in object for " + report_.arch + "; " + report_.note);
    report_.provider = object->name;
    try {
        return Module(driver_, object->image);
    } catch (const DriverError& error) {
        throw Refusal("kernels", object->name + " on " + report_.arch + ": " + error.what() + "; " + report_.note);
    }
}

void Kernels::launch(Way way, Address pieces, uint32_t count, Address segment, const Stream& stream) const {
    if (count == 0) return;
    const unsigned blocks = blocks_for(count, THREADS, multiprocessors_);
    unsigned crews = blocks * (THREADS / CREW_LANES);
    void* arguments[] = {&pieces, &count, &segment, &crews};
    driver_.launch(way == Way::TO_HOST ? gather_ : scatter_, blocks, THREADS, stream.get(), arguments);
}

void Kernels::digest(Address pieces, uint32_t count, const DigestTables& tables, DigestTotals totals,
                     const Stream& stream) const {
    const unsigned enough = blocks_for(count, DIGEST_THREADS, DIGEST_BLOCKS * multiprocessors_);
    const unsigned blocks = std::max(1u, enough);  // without pieces it reports zeros
    unsigned crews = blocks * (DIGEST_THREADS / CREW_LANES);
    Address columns = tables.columns, rows = tables.rows;
    void* arguments[] = {&pieces, &count, &columns, &rows, &totals, &crews};
    driver_.launch(digest_, blocks, DIGEST_THREADS, stream.get(), arguments);
}

}  // namespace kv::gpu
