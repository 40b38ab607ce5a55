// kvserver._native: converts and releases the GIL; no logic. The interface for Python is in kvserver/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <optional>
#include <system_error>

#include "arena/arena_sums.h"
#include "arena/grower.h"
#include "arena/ledger.h"
#include "base/check.h"
#include "base/shared_memory.h"
#include "bind/convert.h"
#include "bind/disk.h"
#include "bind/gpu.h"
#include "bind/keys.h"
#include "copy/board.h"
#include "copy/copy_engine.h"
#include "copy/copy_kernels.h"
#include "copy/pattern.h"
#include "copy/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kv::CopyGroupTuples;
using kv::GroupTuples;
using kv::unpack;
using ReleaseGil = nb::gil_scoped_release;

// An object that close() ends: later calls raise ValueError. Closing twice is allowed.
template <typename T>
struct Closable {
    template <typename... Arguments>
        requires std::is_constructible_v<T, Arguments...>
    explicit Closable(Arguments&&... arguments) : object(std::in_place, std::forward<Arguments>(arguments)...) {}

    T& get() {
        if (!object) kv::bad_argument("already closed");
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
    module.attr("SLOT_ALIGN") = kv::SLOT_ALIGN;
    module.def(
        "create_memfd",
        [](const std::string& name, uint64_t bytes, uint64_t huge_page_bytes, bool sealed) {
            ReleaseGil released;
            return kv::create_memfd(name, bytes, huge_page_bytes, sealed).release();
        },
        "name"_a, "bytes"_a, "huge_page_bytes"_a = 0, "sealed"_a = true);
    module.def("free_huge_pages", &kv::free_huge_pages, "huge_page_bytes"_a, nb::call_guard<ReleaseGil>());
}

void bind_board(nb::module_& module) {
    using kv::WordState;
    using Board = Closable<kv::Board>;
    module.attr("FREE") = static_cast<int>(WordState::FREE);
    module.attr("LIVE") = static_cast<int>(WordState::LIVE);
    module.attr("SUBMITTED") = static_cast<int>(WordState::SUBMITTED);
    module.attr("DONE") = static_cast<int>(WordState::DONE);
    module.attr("ABANDONED") = static_cast<int>(WordState::ABANDONED);
    module.attr("FAILED") = static_cast<int>(WordState::FAILED);

    nb::class_<Board>(module, "Board")
        .def(nb::init<int, uint32_t>(), "fd"_a, "words"_a)
        .def(
            "begin", [](Board& board, uint32_t word) { return board.get().begin(word); }, "word"_a)
        .def(
            "state",
            [](Board& board, uint32_t word) {
                const kv::Word now = board.get().read(word);
                return std::make_tuple(now.generation, static_cast<int>(now.state));
            },
            "word"_a)
        .def(
            "abandon_store",
            [](Board& board, uint32_t word, uint64_t generation) {
                return static_cast<int>(board.get().abandon_store(word, generation));
            },
            "word"_a, "generation"_a)
        .def(
            "abandon_retrieve",
            [](Board& board, uint32_t word, uint64_t generation) {
                return static_cast<int>(board.get().abandon_retrieve(word, generation));
            },
            "word"_a, "generation"_a)
        .def("close", &Board::close);
}

void bind_pattern(nb::module_& module) {
    using Pattern = Closable<kv::Pattern>;
    using Ranges = std::vector<kv::PatternRange>;
    module.def(
        "fill_pattern",
        [](int fd, uint64_t offset, uint64_t bytes, uint64_t seed) {
            ReleaseGil released;
            const kv::PatternRange range{offset, bytes, seed};
            kv::Pattern(fd, offset + bytes).fill({&range, 1});
        },
        "fd"_a, "offset"_a, "bytes"_a, "seed"_a);
    nb::class_<Pattern>(module, "Pattern")
        .def(nb::init<int, uint64_t>(), "fd"_a, "bytes"_a)
        .def(
            "fill",
            [](Pattern& pattern, nb::bytes packed) {
                const Ranges ranges = unpack<kv::PatternRange>(packed, "ranges");
                ReleaseGil released;
                pattern.get().fill(ranges);
            },
            "ranges"_a)
        .def(
            "wrong",
            [](Pattern& pattern, nb::bytes packed) {
                const Ranges ranges = unpack<kv::PatternRange>(packed, "ranges");
                ReleaseGil released;
                return pattern.get().wrong(ranges);
            },
            "ranges"_a)
        .def("close", &Pattern::close);
}

void bind_grower(nb::module_& module) {
    using Grower = Closable<kv::ArenaGrower>;
    nb::class_<Grower>(module, "ArenaGrower")
        .def(
            "__init__",
            [](Grower* self, int fd, uint64_t arena_bytes, uint64_t slab_bytes, int threads,
               const std::vector<int>& numa_nodes) {
                ReleaseGil released;
                new (self) Grower(fd, kv::GrowerOptions{arena_bytes, slab_bytes, threads, numa_nodes});
            },
            "fd"_a, "arena_bytes"_a, "slab_bytes"_a, "threads"_a, "numa_nodes"_a = std::vector<int>{})
        .def_prop_ro("eventfd", [](Grower& grower) { return grower.get().eventfd(); })
        .def_prop_ro("slabs_ready",
                     [](Grower& grower) {
                         ReleaseGil released;
                         return grower.get().slabs_ready();
                     })
        .def_prop_ro("problem",
                     [](Grower& grower) {
                         ReleaseGil released;
                         return grower.get().problem();
                     })
        .def("close", &Grower::close);
}

nb::bytes pack(const std::vector<kv::LedgerRecord>& records) {
    return nb::bytes(records.data(), records.size() * sizeof(kv::LedgerRecord));
}

template <kv::Summed (*Function)(kv::Ledger&, int, uint64_t, int)>
std::tuple<uint64_t, uint64_t, uint64_t> with_sums(Closable<kv::Ledger>& ledger, int arena, uint64_t arena_bytes,
                                                   int threads) {
    ReleaseGil released;
    const auto [slots, bytes, damaged] = Function(ledger.get(), arena, arena_bytes, threads);
    return {slots, bytes, damaged};
}

void bind_ledger(nb::module_& module) {
    using Ledger = Closable<kv::Ledger>;
    nb::class_<Ledger> ledger(module, "Ledger");
    ledger.attr("RECORD_BYTES") = sizeof(kv::LedgerRecord);
    ledger.attr("NAMESPACES_MAX") = kv::Ledger::NAMESPACES_MAX;
    ledger.attr("DOCUMENT_BYTES_MAX") = kv::Ledger::DOCUMENT_BYTES_MAX;
    ledger.def_static("file_bytes", &kv::Ledger::file_bytes, "arena_bytes"_a)
        .def(nb::init<int, uint64_t>(), "fd"_a, "arena_bytes"_a)
        .def(
            "seal",
            [](Ledger& self, nb::bytes packed) {
                const auto records = unpack<kv::LedgerRecord>(packed, "records");
                ReleaseGil released;
                self.get().seal(records);
            },
            "records"_a)
        .def(
            "clear",
            [](Ledger& self, nb::bytes packed) {
                const auto arena_offsets = unpack<int64_t>(packed, "arena_offsets");
                ReleaseGil released;
                self.get().clear(arena_offsets);
            },
            "arena_offsets"_a)
        .def("scan",
             [](Ledger& self) {
                 std::vector<kv::LedgerRecord> records;
                 {
                     ReleaseGil released;
                     records = self.get().scan();
                 }
                 return pack(records);
             })
        .def_prop_ro("damaged", [](Ledger& self) { return self.get().damaged(); })
        .def(
            "put_namespace",
            [](Ledger& self, uint64_t index, nb::bytes document) {
                self.get().put_namespace(index,
                                         {reinterpret_cast<const std::byte*>(document.c_str()), document.size()});
            },
            "index"_a, "document"_a)
        .def(
            "drop_namespace", [](Ledger& self, uint64_t index) { self.get().drop_namespace(index); }, "index"_a)
        .def("forget_pages", [](Ledger& self) { self.get().forget_pages(); })
        .def("namespaces",
             [](Ledger& self) {
                 std::vector<std::pair<uint64_t, nb::bytes>> documents;
                 for (const auto& [index, document] : self.get().namespaces()) {
                     documents.emplace_back(index, nb::bytes(document.data(), document.size()));
                 }
                 return documents;
             })
        .def("put_sums", &with_sums<&kv::put_sums>, "arena"_a, "arena_bytes"_a, "threads"_a)
        .def("compare_sums", &with_sums<&kv::compare_sums>, "arena"_a, "arena_bytes"_a, "threads"_a)
        .def("close", &Ledger::close);
}

using CopyTuples = std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>>;

std::vector<CopyTuples> plan_pieces(const GroupTuples& groups, const CopyGroupTuples& copy_groups, uint64_t arena_bytes,
                                    const std::string& kind, uint64_t bytes_max, uint64_t pages_max) {
    if (bytes_max == 0 || pages_max == 0) kv::bad_argument("bytes_max and pages_max must be at least 1");
    const std::vector<uint64_t> unbounded(4096, 4 * kv::LAYOUT_BYTES_MAX);
    const kv::Layout layout(kv::groups_from(groups), unbounded);
    const kv::Plan plan(layout, kv::copy_groups_from(copy_groups), arena_bytes, kv::kind_from(kind));
    std::vector<CopyTuples> pieces;
    std::vector<kv::PageCopy> copies;
    for (uint64_t begin = 0, end; begin < plan.bytes(); begin = end) {
        end = plan.piece_end(begin, bytes_max, pages_max);
        plan.expand(begin, end, copies);
        CopyTuples& tuples = pieces.emplace_back();
        for (const kv::PageCopy& copy : copies) {
            tuples.emplace_back(copy.buffer, copy.buffer_offset, copy.arena_offset, copy.bytes);
        }
    }
    return pieces;
}

CopyTuples plan_copies(const GroupTuples& groups, const CopyGroupTuples& copy_groups, uint64_t arena_bytes,
                       const std::string& kind) {
    constexpr uint64_t whole = std::numeric_limits<uint64_t>::max();
    std::vector<CopyTuples> pieces = plan_pieces(groups, copy_groups, arena_bytes, kind, whole, whole);
    return pieces.empty() ? CopyTuples() : std::move(pieces.front());
}

void bind_copies(nb::module_& module) {
    module.def("plan_copies", &plan_copies, "groups"_a, "copy_groups"_a, "arena_bytes"_a, "kind"_a);
    module.def("plan_pieces", &plan_pieces, "groups"_a, "copy_groups"_a, "arena_bytes"_a, "kind"_a, "bytes_max"_a,
               "pages_max"_a);
    module.def(
        "copy_seconds",
        [](int source_fd, int target_fd, uint64_t bytes, int threads, bool non_temporal) {
            ReleaseGil released;
            return kv::copy_seconds(source_fd, target_fd, bytes, threads,
                                    non_temporal ? kv::Through::MEMORY : kv::Through::CACHE);
        },
        "source_fd"_a, "target_fd"_a, "bytes"_a, "threads"_a, "non_temporal"_a);

    using kv::CopyEngine;
    nb::class_<CopyEngine>(module, "CopyEngine")
        .def(nb::init<int, uint64_t, int>(), "arena_fd"_a, "arena_bytes"_a, "threads"_a, nb::call_guard<ReleaseGil>())
        .def_prop_ro("backend", &CopyEngine::backend)
        .def_prop_ro("eventfd", &CopyEngine::eventfd)
        .def("map_board", &CopyEngine::map_board, "session"_a, "fd"_a, "words"_a, nb::call_guard<ReleaseGil>())
        .def("drop_board", &CopyEngine::drop_board, "session"_a, nb::call_guard<ReleaseGil>())
        .def(
            "map_cache",
            [](CopyEngine& engine, uint64_t cache, uint64_t session, const std::vector<int>& fds,
               const std::vector<uint64_t>& buffer_bytes, const GroupTuples& groups) {
                ReleaseGil released;
                engine.map_cache(cache, session, fds, buffer_bytes, kv::groups_from(groups));
            },
            "cache"_a, "session"_a, "fds"_a, "buffer_bytes"_a, "groups"_a)
        .def("unmap_cache", &CopyEngine::unmap_cache, "cache"_a, nb::call_guard<ReleaseGil>())
        .def(
            "submit",
            [](CopyEngine& engine, uint64_t job, const std::string& kind, uint64_t cache, uint32_t word,
               uint64_t generation, const CopyGroupTuples& groups) {
                kv::JobOrder order{job, kv::kind_from(kind), cache, word, generation, kv::copy_groups_from(groups)};
                ReleaseGil released;
                engine.submit(std::move(order));
            },
            "job"_a, "kind"_a, "cache"_a, "word"_a, "generation"_a, "groups"_a)
        .def("cancel", &CopyEngine::cancel, "job"_a, nb::call_guard<ReleaseGil>())
        .def(
            "completions",
            [](CopyEngine& engine, size_t most) {
                std::vector<kv::Completion> taken;
                {
                    ReleaseGil released;
                    taken = engine.completions(most);
                }
                return kv::completions_to(taken);
            },
            "most"_a)
        .def("close", &CopyEngine::close, nb::call_guard<ReleaseGil>());
}

std::string build_description() {
    return kv::format("%s %s, %s", __VERSION__,
#if defined(__x86_64__)
                      "x86-64",
#elif defined(__aarch64__)
                      "aarch64",
#else
                      "other processor",
#endif
                      kv::copy_variant().c_str());
}

}  // namespace

NB_MODULE(_native, module) {
    // Objects that live until the interpreter ends are freed with the process, so a list of leaks helps no user.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(translate_system_error);
    module.attr("BUILD") = build_description();
    bind_shared_memory(module);
    bind_grower(module);
    bind_ledger(module);
    bind_board(module);
    bind_copies(module);
    bind_pattern(module);
    kv::bind_keys(module);
    kv::gpu::bind_driver(module);
    kv::gpu::bind_engine(module);
    kv::gpu::bind_client(module);
    kv::disk::bind(module);
}
