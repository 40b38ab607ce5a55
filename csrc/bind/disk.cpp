// Converts and releases the GIL; no logic.

#include <memory>

#include "base/checksum.h"
#include "bind/bind.h"
#include "disk/engine.h"
#include "disk/faults.h"
#include "disk/recovery_order.h"
#include "disk/store.h"

namespace kv::disk {
namespace {

struct PyFaults {
    std::shared_ptr<Faults> faults = std::make_shared<Faults>();
};

// Python's reference to a store; an engine has its own.
struct PyStore {
    std::shared_ptr<Store> store;
    const std::shared_ptr<Store>& get() const {
        if (store == nullptr) bad_argument("already closed");
        return store;
    }
};

Fault fault_from(const std::string& kind) {
    return named<Fault>("kind", kind,
                        {{"error", Fault::ERROR},
                         {"short", Fault::SHORT},
                         {"ragged", Fault::RAGGED},
                         {"torn", Fault::TORN},
                         {"flip", Fault::FLIP},
                         {"misdirect", Fault::MISDIRECT},
                         {"stall", Fault::STALL}});
}

Choice choice_from(const std::string& engine) {
    return named<Choice>("engine", engine,
                         {{"auto", Choice::AUTO}, {"uring", Choice::URING}, {"threads", Choice::THREADS}});
}

Kind disk_kind_from(const std::string& kind) {
    return named<Kind>("kind", kind, {{"write", Kind::WRITE}, {"read", Kind::READ}, {"withdraw", Kind::WITHDRAW}});
}

void bind_faults(nb::module_& module) {
    nb::class_<PyFaults>(module, "DiskFaults")
        .def(nb::init<>())
        .def(
            "plan",
            [](PyFaults& self, uint64_t nth, const std::string& kind, int error, bool lasting) {
                self.faults->plan(nth, {fault_from(kind), error}, lasting);
            },
            "nth"_a, "kind"_a, "errno"_a = EIO, "lasting"_a = false)
        .def("release", [](PyFaults& self) { self.faults->release(); })
        .def_prop_ro("requests", [](PyFaults& self) { return self.faults->requests(); })
        .def_prop_ro("stalled", [](PyFaults& self) { return self.faults->stalled(); })
        .def("record", [](PyFaults& self) { self.faults->record(); })
        .def("trace", [](PyFaults& self) {
            nb::list events;
            for (const auto& [event, request, file, offset, bytes] : self.faults->trace()) {
                const char* const name = file == File::PAYLOADS ? "payloads" : "headers";
                events.append(nb::make_tuple(event, request, name, offset, pack(bytes)));
            }
            return events;
        });
}

void check_device(uint32_t device) {
    if (device >= DEVICES_MAX) bad_argument(format("device=%u must be in [0, %u)", device, DEVICES_MAX));
}

void open_store(PyStore* self, const std::string& directory, uint32_t device, uint64_t capacity_bytes,
                uint64_t segment_bytes, const nb::bytes& fingerprint, const PyFaults* faults) {
    check_device(device);
    const FileOptions options{directory, capacity_bytes, segment_bytes,
                              unpack_one<Fingerprint>(fingerprint, "fingerprint")};
    ReleaseGil released;
    new (self) PyStore{std::make_shared<Store>(directory, open_store_files(options), device,
                                               faults != nullptr ? faults->faults : nullptr)};
}

PyStore open_store_to_read(const std::string& directory, uint32_t device, const nb::bytes& fingerprint, bool alone) {
    check_device(device);
    const auto expected = unpack_one<Fingerprint>(fingerprint, "fingerprint");
    ReleaseGil released;
    const Company company = alone ? Company::NONE : Company::SERVER;
    return {
        std::make_shared<Store>(directory, open_store_files_to_read(directory, expected, company), device, nullptr)};
}

std::vector<std::pair<std::string, std::string>> facts_of(const Store& store) {
    std::string id;
    for (const std::byte byte : store.id()) id += format("%02x", std::to_integer<unsigned>(byte));
    return {{"file", store.directory() + "/" + FILE_NAME},
            {"id", id},
            {"format", format("%u", FORMAT)},
            {"segments", format("%llu", static_cast<unsigned long long>(store.geometry().segments))},
            {"direct", store.direct() ? "yes" : "no"}};
}

void bind_store(nb::module_& module) {
    nb::class_<PyStore> store(module, "DiskStore");
    store.attr("RECORD_BYTES") = sizeof(DiskRecord);
    store.attr("FORMAT") = FORMAT;
    store.attr("FILE") = FILE_NAME;
    store.attr("HEADERS") = HEADERS_NAME;
    store
        .def_static(
            "extents_per_segment",
            [](uint64_t segment_bytes, uint64_t extent_bytes) {
                if (segment_bytes < BLOCK_BYTES || extent_bytes == 0 || extent_bytes % BLOCK_BYTES != 0) {
                    bad_argument("segment_bytes and extent_bytes must be whole blocks, one at least");
                }
                return Geometry::extents_per_segment(segment_bytes, extent_bytes);
            },
            "segment_bytes"_a, "extent_bytes"_a)
        .def("__init__", &open_store, "directory"_a, nb::kw_only(), "device"_a, "capacity_bytes"_a, "segment_bytes"_a,
             "fingerprint"_a, "faults"_a.none() = nb::none())
        .def_static("open_to_read", &open_store_to_read, "directory"_a, nb::kw_only(), "device"_a, "fingerprint"_a,
                    "alone"_a = true)
        .def_prop_ro("device", [](PyStore& self) { return self.get()->device(); })
        .def_prop_ro("segments", [](PyStore& self) { return self.get()->geometry().segments; })
        .def_prop_ro("segment_bytes", [](PyStore& self) { return self.get()->geometry().segment_bytes; })
        .def_prop_ro("file_bytes", [](PyStore& self) { return self.get()->geometry().file_bytes(); })
        .def_prop_ro("created", [](PyStore& self) { return self.get()->created(); })
        .def_prop_ro("emptied_format", [](PyStore& self) { return self.get()->emptied_format(); })
        .def_prop_ro("segments_cut", [](PyStore& self) { return self.get()->segments_cut(); })
        .def_prop_ro("direct", [](PyStore& self) { return self.get()->direct(); })
        .def_prop_ro("facts", [](PyStore& self) { return facts_of(*self.get()); })
        .def_prop_ro("damaged", [](PyStore& self) { return self.get()->damaged(); })
        .def_prop_ro("unreadable", [](PyStore& self) { return self.get()->unreadable(); })
        .def(
            "recover",
            [](PyStore& self, const std::string& engine) {
                const Choice choice = choice_from(engine);
                return pack(without_gil([&] { return self.get()->recover(choice); }));
            },
            "engine"_a = "auto")
        .def(
            "flush", [](PyStore& self) { self.get()->flush(); }, nb::call_guard<ReleaseGil>())
        .def("close", [](PyStore& self) { self.store.reset(); }, nb::call_guard<ReleaseGil>());
}

void bind_recovery_order(nb::module_& module) {
    nb::class_<RecoveryOrder>(module, "RecoveryOrder")
        .def(
            "__init__",
            [](RecoveryOrder* self, const std::vector<nb::bytes>& found, size_t chunk_most) {
                std::vector<DiskRecord> records;
                for (const nb::bytes& packed : found) {
                    const auto more = unpack<DiskRecord>(packed, "found");
                    records.insert(records.end(), more.begin(), more.end());
                }
                without_gil([&] { new (self) RecoveryOrder(std::move(records), chunk_most); });
            },
            "found"_a, nb::kw_only(), "chunk_most"_a)
        .def_prop_ro("records", &RecoveryOrder::records)
        .def_prop_ro("namespaces",
                     [](const RecoveryOrder& self) {
                         nb::dict namespaces;
                         for (const auto& [digest, newest] : self.namespaces()) namespaces[pack(digest)] = newest;
                         return namespaces;
                     })
        .def("next", [](RecoveryOrder& self, size_t most) { return pack(self.next(most)); }, "most"_a);
}

void bind_disk_engine(nb::module_& module) {
    nb::class_<Engine> engine(module, "DiskEngine");
    engine.attr("COMPLETION_BYTES") = sizeof(Completion);
    const std::pair<const char*, Outcome> outcomes[] = {
        {"DONE", Outcome::DONE},   {"IO_ERROR", Outcome::IO_ERROR}, {"CHECKSUM", Outcome::CHECKSUM},
        {"STALE", Outcome::STALE}, {"SHORT", Outcome::SHORT},       {"CANCELLED", Outcome::CANCELLED}};
    for (const auto& [name, outcome] : outcomes) engine.attr(name) = static_cast<int>(outcome);
    engine
        .def(
            "__init__",
            [](Engine* self, int arena_fd, uint64_t arena_bytes, const std::vector<PyStore>& stores,
               const std::string& choice, unsigned depth, unsigned sum_threads, uint64_t registered_piece_bytes,
               int ledger_fd, uint64_t ledger_bytes) {
                std::vector<std::shared_ptr<Store>> opened;
                for (const PyStore& store : stores) opened.push_back(store.get());
                const EngineOptions options{arena_bytes, choice_from(choice),    depth,
                                            sum_threads, registered_piece_bytes, ledger_fd,
                                            ledger_bytes};
                ReleaseGil released;
                new (self) Engine(arena_fd, options, std::move(opened));
            },
            nb::kw_only(), "arena_fd"_a, "arena_bytes"_a, "stores"_a, "engine"_a, "depth"_a, "sum_threads"_a,
            "registered_piece_bytes"_a = REGISTERED_PIECE_BYTES, "ledger_fd"_a = -1, "ledger_bytes"_a = 0)
        .def_prop_ro("backend", &Engine::backend)
        .def_prop_ro("eventfd", &Engine::eventfd)
        .def_prop_ro("registered_bytes", &Engine::registered_bytes)
        .def("arena_ready", &Engine::arena_ready, "bytes"_a, nb::call_guard<ReleaseGil>())
        .def(
            "submit",
            [](Engine& self, uint64_t job, const std::string& kind, const nb::bytes& packed) {
                const auto records = unpack<DiskRecord>(packed, "records");
                const Kind what = disk_kind_from(kind);
                without_gil([&] { self.submit(job, what, records); });
            },
            "job"_a, "kind"_a, "records"_a)
        .def("cancel", &Engine::cancel, "job"_a, nb::call_guard<ReleaseGil>())
        .def(
            "completions", [](Engine& self, size_t most) { return pack(self.completions(most)); }, "most"_a)
        .def("close", &Engine::close, nb::call_guard<ReleaseGil>());
}

}  // namespace
}  // namespace kv::disk

void kv::bind_disk(nb::module_& module) {
    module.def("xxh3", [](const nb::bytes& bytes) { return xxh3(bytes_of(bytes)); }, "bytes"_a);
    disk::bind_faults(module);
    disk::bind_store(module);
    disk::bind_recovery_order(module);
    disk::bind_disk_engine(module);
}
