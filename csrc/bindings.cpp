// kvserver._native: converts and releases the GIL; no logic. What Python may rely on is in kvserver/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <system_error>

#include "board.h"
#include "check.h"
#include "pattern.h"
#include "shared_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ReleaseGil = nb::gil_scoped_release;

// Packed records from Python, copied so that they are aligned and outlive the GIL.
template <typename Record>
std::vector<Record> unpack(nb::bytes packed, const char* what) {
    if (packed.size() % sizeof(Record) != 0) {
        kv::bad_argument(kv::format("%s: %zu bytes must be a multiple of %zu", what, packed.size(), sizeof(Record)));
    }
    std::vector<Record> records(packed.size() / sizeof(Record));
    std::memcpy(records.data(), packed.c_str(), packed.size());
    return records;
}

// An object that close() ends: later calls raise ValueError. Closing twice is allowed.
template <typename T>
struct Closable {
    template <typename... Arguments>
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
        .def("begin", [](Board& board, uint32_t word) { return board.get().begin(word); }, "word"_a)
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

std::string build_description() {
    return kv::format("%s %s", __VERSION__,
#if defined(__x86_64__)
                      "x86-64"
#elif defined(__aarch64__)
                      "aarch64"
#else
                      "other"
#endif
    );
}

}  // namespace

NB_MODULE(_native, module) {
    nb::register_exception_translator(translate_system_error);
    module.attr("BUILD") = build_description();
    bind_shared_memory(module);
    bind_board(module);
    bind_pattern(module);
}
