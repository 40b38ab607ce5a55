// The disk tier's part of kvserver._native. The interface for Python is in kvserver/_native_disk.pyi.

#pragma once

#include <nanobind/nanobind.h>

namespace kv::disk {

void bind(nanobind::module_& module);

}  // namespace kv::disk
