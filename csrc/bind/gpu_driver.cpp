// Libraries, devices and kernels for Python.

#include "bind/bind.h"
#include "gpu/driver/facts.h"
#include "gpu/driver/handles.h"
#include "gpu/kernels/kernels.h"

namespace kv::gpu {
namespace {

auto probe_tuple(const std::string& vendor, const std::string& library) {
    const Probe found = probe(vendor_from(vendor), library);
    return std::make_tuple(found.library, found.version, found.devices, found.missing_required, found.missing_optional,
                           found.problem);
}

auto facts_tuple(const std::string& vendor, const std::string& library, int ordinal) {
    const Driver& driver = Driver::open(vendor_from(vendor), library);
    const DeviceFacts facts = facts_of(driver, ordinal);
    return std::make_tuple(facts.id, facts.name, facts.arch, facts.pci, facts.total_bytes);
}

auto report_tuple(const std::string& vendor, const std::string& library, int ordinal, const std::string& rtc_library,
                  const std::string& cache_dir) {
    const Driver& driver = Driver::open(vendor_from(vendor), library);
    const Current current(driver, ordinal);
    const KernelReport report = Kernels(driver, ordinal, {rtc_library, cache_dir}).report();
    return std::make_tuple(report.provider, report.arch, report.note);
}

}  // namespace
}  // namespace kv::gpu

void kv::bind_driver(nb::module_& module) {
    using namespace gpu;
    nb::exception<DriverError>(module, "DriverError", PyExc_RuntimeError);
    nb::exception<DriverAbsent>(module, "DriverAbsent", PyExc_RuntimeError);
    module.def("probe_driver", &probe_tuple, "vendor"_a, "library"_a = "", nb::call_guard<ReleaseGil>());
    module.def("device_facts", &facts_tuple, "vendor"_a, "library"_a, "ordinal"_a, nb::call_guard<ReleaseGil>());
    module.def("ipc_mode", [](const std::string& vendor) { return ipc_mode(vendor_from(vendor)); }, "vendor"_a);
    module.def("kfd_arch", &kfd_arch, "topology"_a, "pci"_a);
    module.def("kernel_report", &report_tuple, "vendor"_a, "library"_a, "ordinal"_a, "rtc_library"_a = "",
               "cache_dir"_a = "", nb::call_guard<ReleaseGil>());
}
