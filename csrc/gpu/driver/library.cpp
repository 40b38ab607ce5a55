#include "gpu/driver/library.h"

#include <dlfcn.h>
#include <link.h>

namespace kv::gpu {
namespace {

struct Search {
    const std::string& stem;
    std::string found;
};

int look_at(dl_phdr_info* object, size_t, void* pointer) {
    Search& search = *static_cast<Search*>(pointer);
    const std::string path = object->dlpi_name;
    if (path.compare(path.rfind('/') + 1, search.stem.size(), search.stem) != 0) return 0;
    search.found = path;
    return 1;
}

std::string path_of(void* handle, const std::string& asked) {
    link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map->l_name[0] == '\0') return asked;
    return map->l_name;
}

// The path of a mapped library; "" when there is none.
std::string mapped_library(const std::string& stem) {
    Search search{stem, ""};
    dl_iterate_phdr(look_at, &search);
    return search.found;
}

}  // namespace

Opened open_library(const std::string& path, const std::string& stem, const std::vector<std::string>& candidates) {
    std::vector<std::string> tries = candidates;
    if (!path.empty()) {
        tries = {path};
    } else if (const std::string mapped = mapped_library(stem); !mapped.empty()) {
        tries = {mapped};
    }
    Opened opened;
    std::string missing;
    for (const std::string& name : tries) {
        // Local, so that symbols of one vendor's library never resolve another's.
        opened.handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (opened.handle) {
            opened.path = path_of(opened.handle, name);
            opened.problem.clear();
            return opened;
        }
        const std::string reason = dlerror();
        if (reason.find("No such file") != std::string::npos) {
            missing += (missing.empty() ? "" : ", ") + name;
        } else {
            opened.problem += reason + "; ";
        }
    }
    opened.problem += "not found: " + (missing.empty() ? "any other" : missing);
    return opened;
}

}  // namespace kv::gpu
