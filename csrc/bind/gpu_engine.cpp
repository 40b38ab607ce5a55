// kvserver._native: the mover's engine for one device.

#include <optional>

#include "bind/bind.h"
#include "gpu/engine/device_engine.h"

namespace kv::gpu {
namespace {

using BufferTuples = std::vector<std::tuple<nb::bytes, uint64_t>>;
using StagingTuple = std::tuple<nb::bytes, uint64_t, int>;
using MeasuredTuple = std::tuple<double, uint64_t, uint64_t, double, uint64_t, uint64_t>;

JobMode mode_from(const std::string& name) {
    return named<JobMode>(
        "mode", name,
        {{"direct", JobMode::DIRECT}, {"staged", JobMode::STAGED}, {"server-gather", JobMode::SERVER_GATHER}});
}

MeasuredTuple measured_to(const Measured& measured) {
    const auto& [store, retrieve] = measured;
    return {store.gbps,    store.direct_from.staged_bytes,    store.direct_from.bare_bytes,
            retrieve.gbps, retrieve.direct_from.staged_bytes, retrieve.direct_from.bare_bytes};
}

std::optional<Measured> measured_from(const std::optional<MeasuredTuple>& tuple) {
    if (!tuple) return std::nullopt;
    const auto& [out_gbps, out_staged, out_bare, in_gbps, in_staged, in_bare] = *tuple;
    return Measured{{out_gbps, {out_staged, out_bare}}, {in_gbps, {in_staged, in_bare}}};
}

void construct(DeviceEngine* engine, const std::string& kind, const std::string& library, const std::string& device_id,
               const std::string& arena_reach, const std::string& rtc_library, const std::string& cache_dir,
               int arena_fd, uint64_t arena_bytes, uint64_t slab_bytes, int threads, uint64_t gather_segment_bytes,
               const std::optional<MeasuredTuple>& measured) {
    EngineOptions options{
        vendor_from(kind), library,    device_id, arena_reach,          {rtc_library, cache_dir}, arena_fd,
        arena_bytes,       slab_bytes, threads,   gather_segment_bytes, measured_from(measured)};
    const ReleaseGil released;
    new (engine) DeviceEngine(std::move(options));
}

void map_cache(DeviceEngine& engine, uint64_t cache, uint64_t session, const BufferTuples& buffers,
               const std::optional<StagingTuple>& staging, const std::string& ipc_mode, const GroupTuples& groups) {
    CacheOrder order{cache, session, {}, std::nullopt, ipc_mode, groups_from(groups)};
    for (const auto& [handle, bytes] : buffers) {
        order.buffers.push_back({unpack_one<IpcHandle>(handle, "handle"), bytes});
    }
    if (staging) {
        const auto& [handle, segment_bytes, ring_fd] = *staging;
        order.staging = StagingOrder{unpack_one<IpcHandle>(handle, "handle"), segment_bytes, ring_fd};
    }
    const ReleaseGil released;
    engine.map_cache(std::move(order));
}

// Cutter's segments of a job, with (arena offset of the shard, begin, end, staging) for each part.
std::vector<std::vector<FourNumbers>> cut_job(const GroupTuples& groups, const CopyGroupTuples& copy_groups,
                                              uint64_t arena_bytes, const std::string& kind, uint64_t segment_bytes,
                                              uint64_t pieces_max, uint64_t list_bytes_max, bool alone) {
    const Layout layout = layout_from(groups);
    const ShardPlan plan(layout, copy_groups_from(copy_groups), arena_bytes, kind_from(kind));
    Cutter cutter(plan, layout, {segment_bytes, pieces_max, list_bytes_max}, kind_from(kind));
    std::vector<std::vector<FourNumbers>> segments;
    while (!cutter.finished()) {
        std::vector<FourNumbers>& parts = segments.emplace_back();
        for (const SegmentPart& part : cutter.next(alone)) {
            parts.emplace_back(plan.shards()[part.shard].arena_offset, part.begin, part.end, part.staging);
        }
    }
    return segments;
}

}  // namespace
}  // namespace kv::gpu

void kv::bind_engine(nb::module_& module) {
    using namespace gpu;
    module.def("cut_job", &cut_job, "groups"_a, "copy_groups"_a, "arena_bytes"_a, "kind"_a, "segment_bytes"_a,
               "pieces_max"_a, "list_bytes_max"_a, "alone"_a);
    nb::class_<DeviceEngine> engine(module, "DeviceEngine");
    bind_copy_engine(engine);
    engine
        .def("__init__", &construct, nb::kw_only(), "kind"_a, "library"_a, "device_id"_a, "arena_reach"_a,
             "rtc_library"_a, "cache_dir"_a, "arena_fd"_a, "arena_bytes"_a, "slab_bytes"_a, "threads"_a,
             "gather_segment_bytes"_a, "measured"_a.none())
        .def_prop_ro("facts", &DeviceEngine::facts)
        .def_prop_ro("measured", [](const DeviceEngine& self) { return measured_to(self.measured()); })
        .def_prop_ro("imports", &DeviceEngine::imports)
        .def("self_test", &DeviceEngine::self_test, nb::call_guard<ReleaseGil>())
        .def("map_cache", &map_cache, "cache"_a, "session"_a, "buffers"_a, "staging"_a.none(), "ipc_mode"_a, "groups"_a)
        .def(
            "submit",
            [](DeviceEngine& self, uint64_t job, const std::string& kind, uint64_t cache, uint32_t word,
               uint64_t generation, const CopyGroupTuples& groups, const std::string& mode, bool digests) {
                JobOrder order{job, kind_from(kind), cache, word, generation, copy_groups_from(groups), digests};
                const JobMode allowed = mode_from(mode);
                without_gil([&] { self.submit(std::move(order), allowed); });
            },
            "job"_a, "kind"_a, "cache"_a, "word"_a, "generation"_a, "groups"_a, "mode"_a, "digests"_a = false)
        .def("arena_ready", &DeviceEngine::arena_ready, "slabs"_a, nb::call_guard<ReleaseGil>());
}
