// kvserver._native, digests of payloads: converts and releases the GIL; no logic.

#include "base/digest.h"

#include "base/check.h"
#include "bind/bind.h"

namespace kv {
namespace {

using SumTuple = std::tuple<uint64_t, uint64_t>;

DigestSum sum_from(const SumTuple& tuple) { return {std::get<0>(tuple), std::get<1>(tuple)}; }

SumTuple tuple_of(const DigestSum& sum) { return {sum.sum, sum.bytes}; }

DigestPath path_named(const std::string& name) {
    if (name == "best") return DigestPath::BEST;
    if (name == "avx2") return DigestPath::AVX2;
    if (name == "portable") return DigestPath::PORTABLE;
    bad_argument(format("path=%s must be best, avx2 or portable", name.c_str()));
}

}  // namespace

void bind_digest(nb::module_& module) {
    module.attr("DIGEST_PAYLOAD_BYTES_MAX") = DIGEST_PAYLOAD_BYTES_MAX;
    module.def(
        "digest_sum",
        [](const nb::object& bytes, uint64_t begin, uint64_t end, uint64_t offset, const std::string& path) {
            const auto chosen = path_named(path);
            const Memory memory(bytes);
            const auto whole = memory.bytes();
            if (begin > end || end > whole.size()) {
                bad_argument(format("[%lu, %lu) of %zu bytes", begin, end, whole.size()));
            }
            return tuple_of(without_gil([&] { return digest_sum(whole.subspan(begin, end - begin), offset, chosen); }));
        },
        "bytes"_a, "begin"_a, "end"_a, "offset"_a, "path"_a = "best");
    module.def(
        "digest_copy",
        [](const nb::object& source, const nb::object& target, uint64_t offset, const std::string& path) {
            const auto chosen = path_named(path);
            const Memory from(source);
            const WritableMemory to(target);
            const Copy copy{from.bytes().data(), to.bytes().data(), from.bytes().size(), offset};
            check_range("bytes of the target", to.bytes().size(), copy.bytes, copy.bytes);
            check_range("offset", offset, 0, DIGEST_PAYLOAD_BYTES_MAX - copy.bytes);
            uint64_t sum = 0;
            without_gil([&] { digest_copies({&copy, 1}, {&sum, 1}, Through::MEMORY, chosen); });
            return SumTuple(sum, copy.bytes);
        },
        "source"_a, "target"_a, "offset"_a, "path"_a = "best");
    module.def(
        "add_digest_sums",
        [](const SumTuple& one, const SumTuple& other) { return tuple_of(sum_from(one) + sum_from(other)); }, "one"_a,
        "other"_a);
    module.def(
        "payload_digest",
        [](const SumTuple& sum, const nb::bytes& name_space, const nb::bytes& key, uint16_t group, uint16_t shard,
           uint64_t payload_bytes) {
            const ShardName name{unpack_one<Digest>(name_space, "namespace"), unpack_one<Digest>(key, "key"), group,
                                 shard};
            return payload_digest(sum_from(sum), name, payload_bytes);
        },
        "sum"_a, "namespace"_a, "key"_a, "group"_a, "shard"_a, "payload_bytes"_a);
}

}  // namespace kv
