// kvserver._native: converts and releases the GIL; no logic. The interface for Python is in kvserver/_native.pyi.

#include <limits>
#include <optional>
#include <system_error>

#include "arena/grower.h"
#include "arena/ledger.h"
#include "arena/scrubber.h"
#include "base/shared_memory.h"
#include "bind/bind.h"
#include "copy/board.h"
#include "copy/copy_engine.h"
#include "copy/copy_kernels.h"
#include "copy/pattern.h"

namespace kv {
namespace {

// An object that close() ends: later calls raise ValueError. Closing twice is allowed.
template <typename T>
struct Closable {
    template <typename... Arguments>
        requires std::is_constructible_v<T, Arguments...>
    explicit Closable(Arguments&&... arguments) : object(std::in_place, std::forward<Arguments>(arguments)...) {}

    T& get() {
        if (!object) bad_argument("already closed");
        return *object;
    }
    void close() {
        ReleaseGil released;
        object.reset();
    }

    std::optional<T> object;
};

void translate_system_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
        const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

void bind_shared_memory(nb::module_& module) {
    module.attr("SLOT_ALIGN") = SLOT_ALIGN;
    module.def(
        "create_memfd",
        [](const std::string& name, uint64_t bytes, uint64_t huge_page_bytes, bool sealed) {
            return create_memfd(name, bytes, huge_page_bytes, sealed).release();
        },
        "name"_a, "bytes"_a, "huge_page_bytes"_a = 0, "sealed"_a = true, nb::call_guard<ReleaseGil>());
    module.def("free_huge_pages", &free_huge_pages, "huge_page_bytes"_a, nb::call_guard<ReleaseGil>());
    module.def("is_dax", &is_dax, "fd"_a, nb::call_guard<ReleaseGil>());
}

void bind_board(nb::module_& module) {
    using PyBoard = Closable<Board>;
    const std::pair<const char*, WordState> states[] = {
        {"FREE", WordState::FREE}, {"LIVE", WordState::LIVE},           {"SUBMITTED", WordState::SUBMITTED},
        {"DONE", WordState::DONE}, {"ABANDONED", WordState::ABANDONED}, {"FAILED", WordState::FAILED}};
    for (const auto& [name, state] : states) module.attr(name) = static_cast<int>(state);

    nb::class_<PyBoard>(module, "Board")
        .def(nb::init<int, uint32_t>(), "fd"_a, "words"_a)
        .def(
            "begin", [](PyBoard& self, uint32_t word) { return self.get().begin(word); }, "word"_a)
        .def(
            "state",
            [](PyBoard& self, uint32_t word) {
                const auto [generation, state] = self.get().read(word);
                return std::make_tuple(generation, static_cast<int>(state));
            },
            "word"_a)
        .def(
            "abandon_store",
            [](PyBoard& self, uint32_t word, uint64_t generation) {
                return static_cast<int>(self.get().abandon_store(word, generation));
            },
            "word"_a, "generation"_a)
        .def(
            "abandon_retrieve",
            [](PyBoard& self, uint32_t word, uint64_t generation) {
                return static_cast<int>(self.get().abandon_retrieve(word, generation));
            },
            "word"_a, "generation"_a)
        .def("close", &PyBoard::close);
}

void bind_pattern(nb::module_& module) {
    using PyPattern = Closable<Pattern>;
    module.def(
        "fill_pattern",
        [](int fd, uint64_t offset, uint64_t bytes, uint64_t seed) {
            const PatternRange range{offset, bytes, seed};
            Pattern(fd, offset + bytes).fill({&range, 1});
        },
        "fd"_a, "offset"_a, "bytes"_a, "seed"_a, nb::call_guard<ReleaseGil>());
    nb::class_<PyPattern>(module, "Pattern")
        .def(nb::init<int, uint64_t>(), "fd"_a, "bytes"_a)
        .def(
            "fill",
            [](PyPattern& self, const nb::bytes& packed) {
                const auto ranges = unpack<PatternRange>(packed, "ranges");
                without_gil([&] { self.get().fill(ranges); });
            },
            "ranges"_a)
        .def(
            "wrong",
            [](PyPattern& self, const nb::bytes& packed) {
                const auto ranges = unpack<PatternRange>(packed, "ranges");
                return without_gil([&] { return self.get().wrong(ranges); });
            },
            "ranges"_a)
        .def("close", &PyPattern::close);
}

void bind_grower(nb::module_& module) {
    using Grower = Closable<ArenaGrower>;
    nb::class_<Grower>(module, "ArenaGrower")
        .def(
            "__init__",
            [](Grower* self, int fd, uint64_t arena_bytes, uint64_t slab_bytes, int threads,
               const std::vector<int>& numa_nodes) {
                new (self) Grower(fd, GrowerOptions{arena_bytes, slab_bytes, threads, numa_nodes});
            },
            "fd"_a, "arena_bytes"_a, "slab_bytes"_a, "threads"_a, "numa_nodes"_a = std::vector<int>{},
            nb::call_guard<ReleaseGil>())
        .def_prop_ro("eventfd", [](Grower& self) { return self.get().eventfd(); })
        .def_prop_ro("slabs_ready", [](Grower& self) { return without_gil([&] { return self.get().slabs_ready(); }); })
        .def_prop_ro("problem", [](Grower& self) { return without_gil([&] { return self.get().problem(); }); })
        .def("close", &Grower::close);
}

using PyLedger = Closable<Ledger>;

void bind_ledger(nb::module_& module) {
    nb::class_<PyLedger> ledger(module, "Ledger");
    ledger.attr("RECORD_BYTES") = sizeof(LedgerRecord);
    ledger.attr("NAMESPACES_MAX") = Ledger::NAMESPACES_MAX;
    ledger.attr("DOCUMENT_BYTES_MAX") = Ledger::DOCUMENT_BYTES_MAX;
    ledger.def_static("file_bytes", &Ledger::file_bytes, "arena_bytes"_a)
        .def(nb::init<int, uint64_t>(), "fd"_a, "arena_bytes"_a)
        .def(
            "seal",
            [](PyLedger& self, const nb::bytes& packed) {
                const auto records = unpack<LedgerRecord>(packed, "records");
                without_gil([&] { self.get().seal(records); });
            },
            "records"_a)
        .def(
            "clear",
            [](PyLedger& self, const nb::bytes& packed) {
                const auto arena_offsets = unpack<int64_t>(packed, "arena_offsets");
                without_gil([&] { self.get().clear(arena_offsets); });
            },
            "arena_offsets"_a)
        .def("scan", [](PyLedger& self) { return pack(without_gil([&] { return self.get().scan(); })); })
        .def_prop_ro("damaged", [](PyLedger& self) { return self.get().damaged(); })
        .def(
            "put_namespace",
            [](PyLedger& self, uint64_t index, const nb::bytes& document) {
                self.get().put_namespace(index, bytes_of(document));
            },
            "index"_a, "document"_a)
        .def(
            "drop_namespace", [](PyLedger& self, uint64_t index) { self.get().drop_namespace(index); }, "index"_a)
        .def("forget_pages", [](PyLedger& self) { self.get().forget_pages(); })
        .def("namespaces",
             [](PyLedger& self) {
                 std::vector<std::pair<uint64_t, nb::bytes>> documents;
                 for (const auto& [index, document] : self.get().namespaces()) {
                     documents.emplace_back(index, pack(document));
                 }
                 return documents;
             })
        .def(
            "sums",
            [](PyLedger& self, const nb::bytes& packed, const nb::bytes& names) {
                const auto arena_offsets = unpack<int64_t>(packed, "arena_offsets");
                const auto hash = unpack_one<uint64_t>(names, "names");
                const auto sums = without_gil([&] { return self.get().sums(arena_offsets, hash); });
                return sums ? std::optional(pack(*sums)) : std::nullopt;
            },
            "arena_offsets"_a, "names"_a)
        .def("close", &PyLedger::close);
    module.attr("NO_DIGEST") = NO_DIGEST;
}

void bind_scrubber(nb::module_& module) {
    using PyScrubber = Closable<Scrubber>;
    nb::class_<PyScrubber> scrubber(module, "Scrubber");
    scrubber.attr("ITEM_BYTES") = sizeof(ScrubItem);
    scrubber
        .def(nb::init<int, uint64_t, int, uint64_t>(), "arena_fd"_a, "arena_bytes"_a, "ledger_fd"_a, "ledger_bytes"_a,
             nb::call_guard<ReleaseGil>())
        .def_prop_ro("eventfd", [](PyScrubber& self) { return self.get().eventfd(); })
        .def(
            "submit",
            [](PyScrubber& self, uint64_t job, const nb::bytes& packed) {
                auto items = unpack<ScrubItem>(packed, "items");
                without_gil([&] { self.get().submit(job, std::move(items)); });
            },
            "job"_a, "items"_a)
        .def(
            "ends",
            [](PyScrubber& self, size_t most) {
                std::vector<std::tuple<uint64_t, std::vector<uint32_t>, uint64_t>> ends;
                for (const ScrubEnd& end : self.get().ends(most)) ends.emplace_back(end.job, end.wrong, end.bytes);
                return ends;
            },
            "most"_a)
        .def("close", &PyScrubber::close);
}

using CopyTuples = std::vector<FourNumbers>;

std::vector<CopyTuples> plan_pieces(const GroupTuples& groups, const CopyGroupTuples& copy_groups, uint64_t arena_bytes,
                                    const std::string& kind, uint64_t bytes_max, uint64_t pages_max,
                                    const std::string& order_name) {
    if (bytes_max == 0 || pages_max == 0) bad_argument("bytes_max and pages_max must be at least 1");
    const Layout layout = layout_from(groups);
    const auto order = named<StreamOrder>("order", order_name,
                                          {{"neighbours", StreamOrder::NEIGHBOURS}, {"shards", StreamOrder::SHARDS}});
    const Plan plan(layout, copy_groups_from(copy_groups), arena_bytes, kind_from(kind), order);
    std::vector<CopyTuples> pieces;
    std::vector<PageCopy> copies;
    for (uint64_t begin = 0, end; begin < plan.bytes(); begin = end) {
        end = plan.piece_end(begin, bytes_max, pages_max);
        plan.expand(begin, end, copies);
        CopyTuples& tuples = pieces.emplace_back();
        for (const PageCopy& copy : copies) {
            tuples.emplace_back(copy.buffer, copy.buffer_offset, copy.arena_offset, copy.bytes);
        }
    }
    return pieces;
}

void bind_copies(nb::module_& module) {
    constexpr uint64_t whole = std::numeric_limits<uint64_t>::max();
    module.def("plan_pieces", &plan_pieces, "groups"_a, "copy_groups"_a, "arena_bytes"_a, "kind"_a,
               "bytes_max"_a = whole, "pages_max"_a = whole, "order"_a = "neighbours");
    module.def(
        "copy_seconds",
        [](int source_fd, int target_fd, uint64_t bytes, int threads, bool non_temporal) {
            return copy_seconds(source_fd, target_fd, bytes, threads, non_temporal ? Through::MEMORY : Through::CACHE);
        },
        "source_fd"_a, "target_fd"_a, "bytes"_a, "threads"_a, "non_temporal"_a, nb::call_guard<ReleaseGil>());

    nb::class_<CopyEngine> engine(module, "CopyEngine");
    bind_copy_engine(engine);
    engine.def(nb::init<int, uint64_t, int>(), "arena_fd"_a, "arena_bytes"_a, "threads"_a, nb::call_guard<ReleaseGil>())
        .def(
            "map_cache",
            [](CopyEngine& self, uint64_t cache, uint64_t session, const std::vector<int>& fds,
               const std::vector<uint64_t>& buffer_bytes,
               const GroupTuples& groups) { self.map_cache(cache, session, fds, buffer_bytes, groups_from(groups)); },
            "cache"_a, "session"_a, "fds"_a, "buffer_bytes"_a, "groups"_a, nb::call_guard<ReleaseGil>())
        .def(
            "submit",
            [](CopyEngine& self, uint64_t job, const std::string& kind, uint64_t cache, uint32_t word,
               uint64_t generation, const CopyGroupTuples& groups, bool digests) {
                JobOrder order{job, kind_from(kind), cache, word, generation, copy_groups_from(groups), digests};
                without_gil([&] { self.submit(std::move(order)); });
            },
            "job"_a, "kind"_a, "cache"_a, "word"_a, "generation"_a, "groups"_a, "digests"_a = false);
}

std::string build_description() {
    return format("%s %s, %s", __VERSION__,
#if defined(__x86_64__)
                  "x86-64",
#elif defined(__aarch64__)
                  "aarch64",
#else
                  "other processor",
#endif
                  copy_variant().c_str());
}

}  // namespace
}  // namespace kv

NB_MODULE(_native, module) {
    // Objects that live until the interpreter ends are freed with the process, so a list of leaks helps no user.
    nanobind::set_leak_warnings(false);
    nanobind::register_exception_translator(kv::translate_system_error);
    module.attr("BUILD") = kv::build_description();
    kv::bind_shared_memory(module);
    kv::bind_grower(module);
    kv::bind_ledger(module);
    kv::bind_scrubber(module);
    kv::bind_board(module);
    kv::bind_copies(module);
    kv::bind_pattern(module);
    kv::bind_keys(module);
    kv::bind_digest(module);
    kv::bind_driver(module);
    kv::bind_engine(module);
    kv::bind_client(module);
    kv::bind_disk(module);
}
