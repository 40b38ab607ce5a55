// The parts of kvserver._native for GPUs. The interface for Python is in kvserver/_native.pyi.

#pragma once

#include <nanobind/nanobind.h>

namespace kv::gpu {

void bind_driver(nanobind::module_& module);  // libraries, devices, kernels
void bind_engine(nanobind::module_& module);  // the mover's engine
void bind_client(nanobind::module_& module);  // the client's threads and memory

}  // namespace kv::gpu
