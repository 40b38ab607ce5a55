// Touches the pages of a file page by page, as kernels before 5.14 need it: first all of them, then behind the file's
// end. Exits 1 and says what was not as it should be.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>

#include "base/prefault.h"
#include "base/shared_memory.h"

using namespace kv;

namespace {

constexpr uint64_t PAGE = 4096, PAGES = 7, LEFT = 3;

std::byte pattern(uint64_t at) { return static_cast<std::byte>(at * 31 + at / 257); }

bool holds_pattern(std::span<const std::byte> bytes) {
    for (uint64_t at = 0; at < bytes.size(); ++at) {
        if (bytes[at] != pattern(at)) return false;
    }
    return true;
}

bool is(int found, int expected, const char* what) {
    if (found == expected) return true;
    std::printf("%s: expected %d (%s), found %d\n", what, expected, std::strerror(expected), found);
    return false;
}

}  // namespace

int main() {
    const Descriptor file = create_memfd("pages", PAGES * PAGE, /*huge_page_bytes=*/0, /*sealed=*/false);
    const Mapping memory(file.get(), PAGES * PAGE, "the pages");
    for (uint64_t at = 0; at < PAGES * PAGE; ++at) memory.data()[at] = pattern(at);

    if (!is(touch_each_page(memory.data(), PAGES * PAGE), 0, "all pages")) return 1;
    if (!holds_pattern({memory.data(), PAGES * PAGE})) return std::puts("a touched page lost its bytes"), 1;

    if (::ftruncate(file.get(), LEFT * PAGE) != 0) return std::perror("ftruncate"), 1;
    for (int turn = 0; turn < 2; ++turn) {
        if (!is(touch_each_page(memory.data(), PAGES * PAGE), EFAULT, "pages behind the end")) return 1;
        if (!is(touch_each_page(memory.data(), LEFT * PAGE), 0, "pages before the end")) return 1;
    }
    if (!holds_pattern({memory.data(), LEFT * PAGE})) return std::puts("a page that is left lost its bytes"), 1;
    return 0;
}
