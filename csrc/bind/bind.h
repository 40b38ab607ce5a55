// The needs of all bindings: the functions of the module's parts, and conversions between Python's values and ours.
//
// Python's named records of kvserver/transfer/native.py are tuples, and come as those.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "copy/copy_job.h"
#include "copy/layout.h"
#include "copy/plan.h"
#include "gpu/driver/driver.h"

namespace kv {

namespace nb = nanobind;
using namespace nb::literals;
using ReleaseGil = nb::gil_scoped_release;

void bind_keys(nb::module_& module);    // names of chunks
void bind_digest(nb::module_& module);  // digests of payloads
void bind_disk(nb::module_& module);    // the disk tier
void bind_driver(nb::module_& module);  // GPU drivers, devices, kernels
void bind_engine(nb::module_& module);  // a GPU's copy engine, for its mover
void bind_client(nb::module_& module);  // the client's threads and memory on a GPU

// Calls function() without the GIL. It must not touch Python's objects.
template <typename Function>
auto without_gil(Function function) {
    const ReleaseGil released;
    return function();
}

// ------------------------------------------------------------------ bytes

template <typename Values>
nb::bytes pack(const Values& values) {
    const auto bytes = std::as_bytes(std::span(values));
    return nb::bytes(bytes.data(), bytes.size());
}

inline std::span<const std::byte> bytes_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

// The memory of a Python object that has it in one stretch, such as a memoryview. The object keeps it while this lives.
class Memory {
  public:
    explicit Memory(const nb::object& object, int kind = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &view_, kind) != 0) throw nb::python_error();
    }
    ~Memory() { PyBuffer_Release(&view_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::span<const std::byte> bytes() const {
        return {static_cast<const std::byte*>(view_.buf), static_cast<size_t>(view_.len)};
    }

  protected:
    Py_buffer view_;
};

// Memory that may be written to.
class WritableMemory : public Memory {
  public:
    explicit WritableMemory(const nb::object& object) : Memory(object, PyBUF_WRITABLE) {}

    std::span<std::byte> bytes() const { return {static_cast<std::byte*>(view_.buf), static_cast<size_t>(view_.len)}; }
};

// Packed records from Python, copied so that they are aligned and outlive the GIL.
template <typename Record>
std::vector<Record> unpack(const nb::bytes& packed, const char* what) {
    if (packed.size() % sizeof(Record) != 0) {
        bad_argument(format("%s: %zu bytes must be a multiple of %zu", what, packed.size(), sizeof(Record)));
    }
    std::vector<Record> records(packed.size() / sizeof(Record));
    if (!records.empty()) std::memcpy(records.data(), packed.c_str(), packed.size());
    return records;
}

// A value that is packed in exactly these bytes.
template <typename Value>
Value unpack_one(const nb::bytes& packed, const char* what) {
    Value value;
    if (packed.size() != sizeof value) {
        bad_argument(format("%s: %zu bytes; expected %zu", what, packed.size(), sizeof value));
    }
    std::memcpy(&value, packed.c_str(), sizeof value);
    return value;
}

// ------------------------------------------------------------------ names

// The value of that name. `what` is the argument's name.
template <typename Value>
Value named(const char* what, const std::string& name, std::initializer_list<std::pair<const char*, Value>> values) {
    std::string expected;
    for (const auto& [known, value] : values) {
        if (name == known) return value;
        expected += (expected.empty() ? "" : ", ") + std::string(known);
    }
    bad_argument(std::string(what) + "=" + name + " must be one of " + expected);
}

inline gpu::Vendor vendor_from(const std::string& name) {
    return named<gpu::Vendor>("vendor", name, {{"cuda", gpu::Vendor::CUDA}, {"rocm", gpu::Vendor::ROCM}});
}

inline JobKind kind_from(const std::string& name) {
    return named<JobKind>("kind", name, {{"store", JobKind::STORE}, {"retrieve", JobKind::RETRIEVE}});
}

// ------------------------------------------------------------------ layouts and jobs

using RunTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
using GroupTuples = std::vector<std::tuple<int64_t, int64_t, std::vector<RunTuple>>>;
using CopyGroupTuples = std::vector<std::tuple<int64_t, int64_t, nb::bytes, nb::bytes, nb::bytes>>;
using FourNumbers = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;

// Converts to unsigned. Negative numbers become too large ones, which the layout and the plan refuse.
constexpr uint64_t unsign(int64_t number) { return static_cast<uint64_t>(number); }

inline std::vector<Group> groups_from(const GroupTuples& tuples) {
    std::vector<Group> groups;
    for (const auto& [blocks_per_chunk, blocks, runs] : tuples) {
        Group& group = groups.emplace_back(Group{unsign(blocks_per_chunk), unsign(blocks), {}});
        for (const auto& [buffer, offset, regions, region_stride, block_stride, page_bytes] : runs) {
            group.runs.push_back({unsign(buffer), unsign(offset), unsign(regions), unsign(region_stride),
                                  unsign(block_stride), unsign(page_bytes)});
        }
    }
    return groups;
}

// A layout for pure functions, which have no buffers: sizes are the largest that it may ask for.
inline Layout layout_from(const GroupTuples& groups) {
    return Layout(groups_from(groups), std::vector<uint64_t>(4096, 4 * LAYOUT_BYTES_MAX));
}

inline std::vector<CopyGroup> copy_groups_from(const CopyGroupTuples& tuples) {
    std::vector<CopyGroup> copy_groups;
    for (const auto& [group, first_block, block_ids, slots, sums] : tuples) {
        copy_groups.push_back({unsign(group), unsign(first_block), unpack<int32_t>(block_ids, "block_ids"),
                               unpack<int64_t>(slots, "slots"), unpack<uint64_t>(sums, "sums")});
    }
    return copy_groups;
}

// The methods that CopyEngine and DeviceEngine have in common.
template <typename Engine>
void bind_copy_engine(nb::class_<Engine>& engine) {
    engine.def_prop_ro("backend", &Engine::backend)
        .def_prop_ro("eventfd", &Engine::eventfd)
        .def("map_board", &Engine::map_board, "session"_a, "fd"_a, "words"_a, nb::call_guard<ReleaseGil>())
        .def("drop_board", &Engine::drop_board, "session"_a, nb::call_guard<ReleaseGil>())
        .def("unmap_cache", &Engine::unmap_cache, "cache"_a, nb::call_guard<ReleaseGil>())
        .def("cancel", &Engine::cancel, "job"_a, nb::call_guard<ReleaseGil>())
        .def(
            "completions",
            [](Engine& self, size_t most) {
                nb::list list;
                for (const Completion& end : without_gil([&] { return self.completions(most); })) {
                    list.append(nb::make_tuple(end.subject, name_of(end.status), end.bytes, end.copy_ns, end.code,
                                               end.message, end.mode, pack(end.sums), end.wrong));
                }
                return list;
            },
            "most"_a)
        .def("close", &Engine::close, nb::call_guard<ReleaseGil>());
}

}  // namespace kv
