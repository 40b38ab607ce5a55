// Libraries, devices and kernels for Python: for choosing a device, for doctor, and for tests.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/check.h"
#include "bind/gpu.h"
#include "gpu/driver/driver.h"
#include "gpu/driver/facts.h"
#include "gpu/driver/handles.h"
#include "gpu/driver/library.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/rtc.h"

namespace kv::gpu {
namespace {

namespace nb = nanobind;
using namespace nb::literals;
using ReleaseGil = nb::gil_scoped_release;

Vendor vendor_from(const std::string& name) {
    if (name == name_of(Vendor::CUDA)) return Vendor::CUDA;
    if (name == name_of(Vendor::ROCM)) return Vendor::ROCM;
    bad_argument("vendor must be cuda or rocm, not " + name);
}

auto probe_tuple(const std::string& vendor, const std::string& library) {
    ReleaseGil released;
    const Probe found = probe(vendor_from(vendor), library);
    return std::make_tuple(found.library, found.version, found.devices, found.missing_required, found.missing_optional,
                           found.problem);
}

auto facts_tuple(const std::string& vendor, const std::string& library, int ordinal) {
    ReleaseGil released;
    const Driver& driver = Driver::open(vendor_from(vendor), library);
    const DeviceFacts facts = facts_of(driver, ordinal);
    return std::make_tuple(facts.id, facts.name, facts.arch, facts.pci, facts.total_bytes);
}

auto report_tuple(const std::string& vendor, const std::string& library, int ordinal, const std::string& rtc_library,
                  const std::string& cache_dir) {
    ReleaseGil released;
    const Driver& driver = Driver::open(vendor_from(vendor), library);
    const Current current(driver, ordinal);
    const KernelReport report = Kernels(driver, ordinal, {rtc_library, cache_dir}).report();
    return std::make_tuple(report.provider, report.arch, report.note);
}

std::vector<std::string> mapped_vendors() {
    std::vector<std::string> vendors;
    if (!mapped_library("libcuda.so").empty()) vendors.emplace_back(name_of(Vendor::CUDA));
    if (!mapped_library("libamdhip64.so").empty()) vendors.emplace_back(name_of(Vendor::ROCM));
    return vendors;
}

}  // namespace

void bind_driver(nb::module_& module) {
    nb::exception<DriverError>(module, "DriverError", PyExc_RuntimeError);
    nb::exception<DriverAbsent>(module, "DriverAbsent", PyExc_RuntimeError);
    module.def("probe_driver", &probe_tuple, "vendor"_a, "library"_a = "");
    module.def(
        "choose_vendor",
        [](const std::string& kind, const std::string& library) {
            ReleaseGil released;
            return std::string(name_of(choose(kind, library)));
        },
        "kind"_a, "library"_a = "");
    module.def("mapped_vendors", &mapped_vendors);
    module.def("device_facts", &facts_tuple, "vendor"_a, "library"_a, "ordinal"_a);
    module.def(
        "device_ordinal",
        [](const std::string& vendor, const std::string& library, const std::string& id) {
            ReleaseGil released;
            return ordinal_of(Driver::open(vendor_from(vendor), library), id);
        },
        "vendor"_a, "library"_a, "id"_a);
    module.def("ipc_mode", [](const std::string& vendor) { return ipc_mode(vendor_from(vendor)); }, "vendor"_a);
    module.def("kfd_arch", &kfd_arch, "topology"_a, "pci"_a);
    module.def("kernel_report", &report_tuple, "vendor"_a, "library"_a, "ordinal"_a, "rtc_library"_a = "",
               "cache_dir"_a = "");
}

}  // namespace kv::gpu
