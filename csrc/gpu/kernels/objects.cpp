#include "gpu/kernels/objects.h"

#include <cstdlib>

// The bytes of the files, each followed by a zero, which PTX needs. Aligned to pages, as a bundle's objects are.
#define KV_EMBED(symbol, file)                                                                                \
    asm(".pushsection .rodata\n.balign 4096\n" #symbol ":\n.incbin \"" KV_OBJECTS_DIR "/" file "\"\n" #symbol \
        "_end:\n.byte 0\n.popsection\n");                                                                     \
    extern "C" __attribute__((visibility("hidden"))) const char symbol[];                                     \
    extern "C" __attribute__((visibility("hidden"))) const char symbol##_end[];

KV_EMBED(kv_embedded_source, "../kernel_source.h")
KV_EMBED(kv_embedded_piece, "../piece.h")
KV_EMBED(kv_embedded_sm80, "kv_sm80.ptx")
KV_EMBED(kv_embedded_sm90, "kv_sm90.ptx")
KV_EMBED(kv_embedded_sm100, "kv_sm100.ptx")
KV_EMBED(kv_embedded_sm120, "kv_sm120.ptx")
KV_EMBED(kv_embedded_amd, "kv_amd.hipfb")

namespace kv::gpu {
namespace {

std::string_view between(const char* begin, const char* end) { return {begin, static_cast<size_t>(end - begin)}; }

struct Ptx {
    int capability;
    const char* text;
};
constexpr Ptx NEWEST_FIRST[] = {
    {120, kv_embedded_sm120}, {100, kv_embedded_sm100}, {90, kv_embedded_sm90}, {80, kv_embedded_sm80}};

}  // namespace

std::string_view kernel_source() { return between(kv_embedded_source, kv_embedded_source_end); }
std::string_view piece_header() { return between(kv_embedded_piece, kv_embedded_piece_end); }

std::optional<BuiltIn> built_in(Vendor vendor, const std::string& arch) {
    if (vendor == Vendor::ROCM) return BuiltIn{"built-in bundle", kv_embedded_amd};
    if (arch.rfind("sm_", 0) != 0) return std::nullopt;
    const int capability = std::atoi(arch.c_str() + 3);
    for (const Ptx& ptx : NEWEST_FIRST) {
        if (ptx.capability <= capability) return BuiltIn{"built-in ptx sm_" + std::to_string(ptx.capability), ptx.text};
    }
    return std::nullopt;
}

}  // namespace kv::gpu
