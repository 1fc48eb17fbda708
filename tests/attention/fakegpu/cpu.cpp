#include "device.h"
#include "settings.h"

#include <dirent.h>
#include <dlfcn.h>

namespace fakegpu {
namespace {

// Paths of libggml-cpu-*.so in a folder.
std::vector<std::string> libraries(const std::string &folder) {
    const std::string prefix = "libggml-cpu-", suffix = ".so";
    std::vector<std::string> found;
    DIR *open = opendir(folder.c_str());
    if (!open) return found;
    while (const dirent *entry = readdir(open)) {
        const std::string name = entry->d_name;
        const bool fits = name.size() > prefix.size() + suffix.size() && name.compare(0, prefix.size(), prefix) == 0 &&
                          name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
        if (fits) found.push_back(folder + "/" + name);
    }
    closedir(open);
    return found;
}

// As GGML's own loader does: the library with the highest score that is not 0.
std::string best_library() {
    Dl_info self;
    if (!dladdr(reinterpret_cast<void *>(&best_library), &self)) return "";
    const std::string path = self.dli_fname, folder = path.substr(0, path.rfind('/'));
    std::string best;
    int best_score = 0;
    for (const std::string &place : {folder, folder + "/.."}) {
        for (const std::string &library : libraries(place)) {
            void *handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
            const auto score = handle ? reinterpret_cast<ggml_backend_score_t>(dlsym(handle, "ggml_backend_score")) : nullptr;
            if (score && score() > best_score) {
                best_score = score();
                best = library;
            }
            if (handle) dlclose(handle);
        }
    }
    return best;
}

ggml_backend_dev_t load() {
    const std::string library = best_library();
    void *handle = library.empty() ? nullptr : dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto init = handle ? reinterpret_cast<ggml_backend_init_t>(dlsym(handle, "ggml_backend_init")) : nullptr;
    ggml_backend_reg_t registry = init ? init() : nullptr;
    say("computes with %s", registry ? library.c_str() : "nothing: no CPU library of GGML is here");
    return registry ? registry->iface.get_device(registry, 0) : nullptr;
}

} // namespace

ggml_backend_dev_t cpu_device() {
    static const ggml_backend_dev_t device = load();
    return device;
}

} // namespace fakegpu
