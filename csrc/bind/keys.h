// What names of chunks add to kvserver._native. What Python may rely on is in kvserver/_native.pyi.

#pragma once

#include <nanobind/nanobind.h>

namespace kv {

void bind_keys(nanobind::module_& module);

}  // namespace kv
