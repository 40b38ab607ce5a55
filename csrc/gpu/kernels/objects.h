// The built-in kernels: their source for the run-time compiler, and objects compiled ahead of time.

#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "gpu/driver/driver.h"

namespace kv::gpu {

std::string_view kernel_source();  // kernel_source.h
std::string_view piece_header();   // piece.h, which it includes as "gpu/kernels/piece.h"

struct BuiltIn {
    std::string name;   // "built-in ptx sm_90", "built-in bundle"
    const void* image;  // as the driver loads it
};

// The best object for `arch`. CUDA: the newest PTX that is not newer than the device. ROCm: the bundle for all
// architectures that we build for. nullopt: the device is older than all of them.
std::optional<BuiltIn> built_in(Vendor vendor, const std::string& arch);

}  // namespace kv::gpu
