// kvserver._native, names of chunks: converts and releases the GIL; no logic.

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "bind/bind.h"
#include "keys/marks.h"
#include "keys/namer.h"

namespace kv {
namespace {

// Tokens that are hashed in about 20 us. A thread that releases the GIL may wait much longer to get it back.
constexpr size_t QUICK_TOKENS = 8192;

// Distance of prefetching, in numbers. Each number is an object. Copying those that have left the nearer caches is
// about a tenth faster with it (measured with 8K and 32K of them).
constexpr size_t PREFETCHED = 32;

constexpr double WAIT_S_MAX = 3600;

// The token in a Python number; negative if it is none. Nearly all have one digit of 30 bits and need no call.
int64_t token_from(PyObject* number) {
    if (!PyLong_Check(number)) return -1;
#if PY_VERSION_HEX >= 0x030c0000
    auto* whole = reinterpret_cast<PyLongObject*>(number);
    if (PyUnstable_Long_IsCompact(whole)) return PyUnstable_Long_CompactValue(whole);
#else
    if (Py_SIZE(number) == 1) return reinterpret_cast<PyLongObject*>(number)->ob_digit[0];
    if (Py_SIZE(number) <= 0) return Py_SIZE(number);
#endif
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return overflow == 0 && value <= UINT32_MAX ? value : -1;
}

// Copies ids[begin:end] to `tokens`. Runs no Python code, so nobody can change the list meanwhile.
void copy_tokens(const nb::list& ids, size_t begin, size_t end, uint32_t* tokens) {
    if (begin > end || end > ids.size()) {
        bad_argument(format("tokens [%zu, %zu) of %zu", begin, end, ids.size()));
    }
    PyObject* const* numbers = reinterpret_cast<PyListObject*>(ids.ptr())->ob_item;
    for (size_t i = begin; i < end; ++i) {
        __builtin_prefetch(numbers[std::min(i + PREFETCHED, end - 1)]);
        const int64_t token = token_from(numbers[i]);
        if (token < 0) bad_argument(format("token %zu must be an integer in [0, 2^32)", i));
        tokens[i - begin] = static_cast<uint32_t>(token);
    }
}

// A prompt that is copied piece by piece. The GIL protects it.
class Tokens {
  public:
    explicit Tokens(size_t total) : ids_(std::make_unique_for_overwrite<uint32_t[]>(total)), total_(total) {}

    // Copies the next tokens, at most `most`. Returns how many are left.
    size_t add(const nb::list& ids, size_t most) {
        const size_t end = copied_ + std::min(most, total_ - copied_);
        copy_tokens(ids, copied_, end, &ids_[copied_]);
        copied_ = end;
        return total_ - copied_;
    }

    Chain take(size_t chunk_tokens, const Digest& before) {
        if (copied_ < total_) bad_argument(format("%zu tokens; expected %zu", copied_, total_));
        copied_ = 0;
        return {std::move(ids_), std::exchange(total_, 0), chunk_tokens, before};
    }

  private:
    std::unique_ptr<uint32_t[]> ids_;
    size_t total_;
    size_t copied_ = 0;
};

void check(size_t chunk_tokens) {
    if (chunk_tokens == 0) bad_argument("chunk_tokens=0 must be at least 1");
}

nb::bytes chain_keys_of_list(const nb::list& ids, size_t begin, size_t end, size_t chunk_tokens,
                             const nb::bytes& before) {
    check(chunk_tokens);
    const auto first = unpack_one<Digest>(before, "before");
    const size_t count = begin < end ? end - begin : 0;
    const auto copied = std::make_unique_for_overwrite<uint32_t[]>(count);
    copy_tokens(ids, begin, end, copied.get());
    const std::span<const uint32_t> tokens(copied.get(), count);
    if (count <= QUICK_TOKENS) return pack(chain_keys(tokens, chunk_tokens, first));
    return pack(without_gil([&] { return chain_keys(tokens, chunk_tokens, first); }));
}

nb::bytes chain_keys_of_packed(const nb::bytes& packed, size_t chunk_tokens, const nb::bytes& before) {
    check(chunk_tokens);
    const auto first = unpack_one<Digest>(before, "before");
    const auto tokens = unpack<uint32_t>(packed, "tokens");
    return pack(without_gil([&] { return chain_keys(tokens, chunk_tokens, first); }));
}

nb::bytes block_hash_keys_of_list(const nb::list& hashes, size_t first, size_t stride, const nb::bytes& head) {
    if (stride == 0) bad_argument("stride=0 must be at least 1");
    std::vector<Digest> taken;
    taken.reserve(hashes.size() / stride + 1);
    for (size_t i = first; i < hashes.size(); i += stride) {
        const nb::handle hash = PyList_GET_ITEM(hashes.ptr(), static_cast<Py_ssize_t>(i));
        if (!PyBytes_Check(hash.ptr())) bad_argument(format("hash %zu is not bytes", i));
        taken.push_back(unpack_one<Digest>(nb::borrow<nb::bytes>(hash), "block hash"));
    }
    return pack(block_hash_keys(bytes_of(head), taken));
}

}  // namespace

void bind_keys(nb::module_& module) {
    module.def(
        "sha256",
        [](const nb::bytes& bytes, bool portable) {
            const auto path = portable ? Sha256Path::PORTABLE : Sha256Path::BEST;
            return pack(sha256(std::array{bytes_of(bytes)}, path));
        },
        "bytes"_a, "portable"_a = false);
    module.def("chain_keys", chain_keys_of_list, "token_ids"_a, "begin"_a, "end"_a, "chunk_tokens"_a, "before"_a);
    module.def("chain_keys_of_packed", chain_keys_of_packed, "tokens"_a, "chunk_tokens"_a, "before"_a);
    module.def("block_hash_keys", block_hash_keys_of_list, "block_hashes"_a, "first"_a, "stride"_a, "head"_a);

    nb::class_<Tokens>(module, "Tokens")
        .def(nb::init<size_t>(), "total"_a)
        .def("add", &Tokens::add, "token_ids"_a, "most"_a);
    nb::class_<Naming>(module, "Naming")
        .def_prop_ro("ready", &Naming::ready)
        .def(
            "wait",
            [](Naming& naming, double seconds) {
                const std::chrono::duration<double> most(std::clamp(seconds, 0.0, WAIT_S_MAX));
                return naming.wait(std::chrono::duration_cast<std::chrono::nanoseconds>(most));
            },
            "seconds"_a, nb::call_guard<ReleaseGil>())
        .def("keys", [](Naming& naming) {
            if (!naming.ready()) without_gil([&] { naming.keys(); });
            return pack(naming.keys());
        });
    nb::class_<Namer>(module, "Namer")
        .def(nb::init<>())
        .def(
            "name",
            [](Namer& namer, Tokens& tokens, size_t chunk_tokens, const nb::bytes& before) {
                check(chunk_tokens);
                return namer.name(tokens.take(chunk_tokens, unpack_one<Digest>(before, "before")));
            },
            "tokens"_a, "chunk_tokens"_a, "before"_a);

    nb::class_<Marker>(module, "Marker")
        .def(
            "__init__",
            [](Marker* marker, const nb::bytes& name_space, uint64_t epoch) {
                new (marker) Marker(bytes_of(name_space), epoch);
            },
            "namespace"_a, "epoch"_a)
        .def("of", [](const Marker& marker, const nb::bytes& key) { return marker.of(bytes_of(key)); }, "key"_a);
    nb::class_<MarkTable>(module, "MarkTable")
        .def(nb::init<size_t>(), "most"_a)
        .def("put", &MarkTable::put, "mark"_a)
        .def("kind", &MarkTable::kind, "mark"_a)
        .def(
            "kind_of",
            [](const MarkTable& table, const Marker& marker, const nb::bytes& key) {
                return table.kind(marker.of(bytes_of(key)));
            },
            "marker"_a, "key"_a);
}

}  // namespace kv
