// The part of kvserver._native that names chunks. The interface for Python is in kvserver/_native.pyi.

#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_keys(nanobind::module_& module);

}  // namespace kv
