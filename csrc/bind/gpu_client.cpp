// kvserver._native, the client's part of the GPU path: converts and releases the GIL; no logic.

#include "bind/bind.h"
#include "gpu/driver/facts.h"
#include "gpu/staging/event_watch.h"
#include "gpu/staging/expand.h"
#include "gpu/staging/exporter.h"
#include "gpu/staging/ring.h"
#include "gpu/staging/staged_copier.h"

namespace kv::gpu {
namespace {

const Driver& driver_of(const std::string& vendor, const std::string& library) {
    return Driver::open(vendor_from(vendor), library);
}

// ---------------------------------------------------------------- lists

using PieceTuple = std::tuple<uint64_t, uint64_t, uint64_t>;
using StretchTuple = std::tuple<uint32_t, uint32_t, nb::bytes, uint32_t, uint64_t, uint64_t>;

// Stretches with the ids that they point to.
struct Stretches {
    explicit Stretches(const std::vector<StretchTuple>& tuples) {
        for (const auto& tuple : tuples) ids.push_back(unpack<int32_t>(std::get<2>(tuple), "block_ids"));
        for (size_t index = 0; index < tuples.size(); ++index) {
            const auto& [group, first_in_chunk, packed, staging, begin, end] = tuples[index];
            list.push_back({{group, first_in_chunk, ids[index]}, staging, begin, end});
        }
    }
    std::vector<std::vector<int32_t>> ids;
    std::vector<StagedStretch> list;
};

std::optional<std::vector<PieceTuple>> expand_stretches(const GroupTuples& groups, const nb::bytes& list,
                                                        uint64_t segment_bytes, const std::vector<uint64_t>& bases) {
    const Layout layout = layout_from(groups);
    const auto copy = unpack<std::byte>(list, "list");
    std::vector<Piece> pieces;
    for (const auto& [shard, staging, begin, end] : unpack_stretches(copy, layout, segment_bytes)) {
        if (!expand(layout, shard, begin, end, staging, bases, pieces)) return std::nullopt;
    }
    std::vector<PieceTuple> tuples;
    for (const Piece& piece : pieces) tuples.emplace_back(piece.pool, piece.staging, piece.bytes);
    return tuples;
}

nb::bytes pack_list(const std::vector<StretchTuple>& tuples) {
    std::vector<std::byte> list(LIST_BYTES);
    list.resize(pack_stretches(Stretches(tuples).list, list));
    return pack(list);
}

void bind_lists(nb::module_& module) {
    module.attr("PIECES_MAX") = PIECES_MAX;
    module.attr("PIECE_BYTES_MAX") = PIECE_BYTES_MAX;
    module.def("pack_stretches", &pack_list, "stretches"_a);
    module.def("expand_stretches", &expand_stretches, "groups"_a, "list"_a, "segment_bytes"_a, "bases"_a);
    module.def(
        "pieces_at_most",
        [](const GroupTuples& groups, uint32_t group, uint64_t begin, uint64_t end) {
            return pieces_at_most(layout_from(groups).groups().at(group), begin, end);
        },
        "groups"_a, "group"_a, "begin"_a, "end"_a);
}

// ---------------------------------------------------------------- ring

void bind_ring(nb::module_& module) {
    nb::class_<RingOwner>(module, "RingOwner")
        .def(nb::init<uint64_t>(), "segment_bytes"_a)
        .def_prop_ro("fd", &RingOwner::fd)
        .def(
            "take",
            [](RingOwner& ring, uint32_t lane) -> nb::object {
                const auto asked = ring.take(lane);
                if (!asked) return nb::none();
                return nb::make_tuple(asked->segment, asked->sequence, asked->job, static_cast<uint32_t>(asked->work),
                                      pack(asked->list));
            },
            "lane"_a)
        .def(
            "done",
            [](RingOwner& ring, uint32_t lane, uint32_t segment, uint64_t sequence, const nb::bytes& sums) {
                ring.done(lane, segment, sequence, unpack<DigestSum>(sums, "sums"));
            },
            "lane"_a, "segment"_a, "sequence"_a, "sums"_a = nb::bytes("", 0))
        .def("fault", &RingOwner::fault, "lane"_a, "segment"_a, "sequence"_a, "code"_a)
        .def("sleep", &RingOwner::sleep, "timeout_ms"_a, nb::call_guard<ReleaseGil>());
    nb::class_<RingPeer>(module, "RingPeer")
        .def(nb::init<int, uint64_t>(), "fd"_a, "segment_bytes"_a)
        .def(
            "ask",
            [](RingPeer& ring, uint32_t lane, uint32_t segment, uint64_t job, const std::vector<StretchTuple>& tuples,
               uint32_t work) {
                return ring.ask(lane, segment, job, static_cast<SegmentWork>(work), Stretches(tuples).list);
            },
            "lane"_a, "segment"_a, "job"_a, "stretches"_a, "work"_a = 0)
        .def(
            "sums",
            [](const RingPeer& ring, uint32_t lane, uint32_t segment, size_t count) {
                return pack(ring.sums(lane, segment, count));
            },
            "lane"_a, "segment"_a, "count"_a)
        .def(
            "state",
            [](const RingPeer& ring, uint32_t lane, uint32_t segment) {
                return static_cast<int>(ring.state(lane, segment));
            },
            "lane"_a, "segment"_a)
        .def("withdraw", &RingPeer::withdraw, "lane"_a, "segment"_a)
        .def("recycle", &RingPeer::recycle, "lane"_a, "segment"_a)
        .def("fault", &RingPeer::fault, "lane"_a, "segment"_a);
}

// ---------------------------------------------------------------- memory and threads

nb::tuple export_tuple(const std::string& vendor, const std::string& library, uint64_t pointer, uint64_t bytes) {
    const auto [device, ordinal, base, size, handle] =
        without_gil([&] { return export_memory(driver_of(vendor, library), pointer, bytes); });
    return nb::make_tuple(device, ordinal, base, size, pack(handle.bytes));
}

void bind_copier(nb::module_& module) {
    nb::class_<StagedCopier>(module, "StagedCopier")
        .def(
            "__init__",
            [](StagedCopier* self, const std::string& vendor, const std::string& library, int ordinal,
               uint64_t segment_bytes, uint64_t shard_bytes, const std::string& rtc_library,
               const std::string& cache_dir) {
                new (self) StagedCopier(driver_of(vendor, library),
                                        {ordinal, segment_bytes, shard_bytes, {rtc_library, cache_dir}});
            },
            "vendor"_a, "library"_a, "ordinal"_a, "segment_bytes"_a, "shard_bytes"_a, "rtc_library"_a, "cache_dir"_a,
            nb::call_guard<ReleaseGil>())
        .def_prop_ro("handle", [](const StagedCopier& copier) { return pack(copier.handle().bytes); })
        .def_prop_ro("segment_bytes", &StagedCopier::segment_bytes)
        .def_prop_ro("kernels",
                     [](const StagedCopier& copier) {
                         const auto& [provider, arch, note] = copier.kernels();
                         return nb::make_tuple(provider, arch, note);
                     })
        .def(
            "begin_ring",
            [](StagedCopier& copier, const GroupTuples& groups, std::vector<uint64_t> bases,
               const std::vector<uint64_t>& buffer_bytes) {
                if (bases.size() != buffer_bytes.size()) {
                    bad_argument(format("%zu bases came for %zu buffers", bases.size(), buffer_bytes.size()));
                }
                return copier.begin_ring(Layout(groups_from(groups), buffer_bytes), std::move(bases));
            },
            "groups"_a, "bases"_a, "buffer_bytes"_a)
        .def("end_ring", &StagedCopier::end_ring)
        .def_prop_ro("quiet", &StagedCopier::quiet)
        .def("mark", &StagedCopier::mark, "lane"_a)
        .def("passed", &StagedCopier::passed, "lane"_a, "mark"_a)
        .def_prop_ro("eventfd", &StagedCopier::eventfd)
        .def_prop_ro("broken", &StagedCopier::broken);
    nb::class_<EventWatch>(module, "EventWatch")
        .def(
            "__init__",
            [](EventWatch* self, const std::string& vendor, const std::string& library, int ordinal) {
                new (self) EventWatch(driver_of(vendor, library), ordinal);
            },
            "vendor"_a, "library"_a, "ordinal"_a, nb::call_guard<ReleaseGil>())
        .def(
            "watch",
            [](EventWatch& watch, uint64_t ticket, uint64_t event) {
                watch.watch(ticket, reinterpret_cast<EventPointer>(event));
            },
            "ticket"_a, "event"_a)
        .def_prop_ro("eventfd", &EventWatch::eventfd)
        .def("completed", &EventWatch::completed);
}

}  // namespace
}  // namespace kv::gpu

void kv::bind_client(nb::module_& module) {
    gpu::bind_lists(module);
    gpu::bind_ring(module);
    module.def("export_memory", &gpu::export_tuple, "vendor"_a, "library"_a, "pointer"_a, "bytes"_a);
    gpu::bind_copier(module);
}
