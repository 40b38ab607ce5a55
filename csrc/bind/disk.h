// What the disk tier adds to kvserver._native. What Python may rely on is in kvserver/_native.pyi.

#pragma once

#include <nanobind/nanobind.h>

namespace kv::disk {

void bind(nanobind::module_& module);

}  // namespace kv::disk
