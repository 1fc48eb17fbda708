// Which engine computes attention, and the files of csrc's kernels for a device: `tiering patch --cuda stock` makes them
// (ollama_tiering/kernels/images.py), in a folder `paged_attn` beside the folder of the stock library, or in it.
#include "shim.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <fstream>
#include <iterator>

namespace shim {

namespace {

bool wanted() {
    const char *engine = std::getenv("OLLAMA_PAGED_ENGINE");
    if (!engine || !*engine || !std::strcmp(engine, "stock")) return false;
    if (!std::strcmp(engine, "exact")) return true;
    GGML_LOG_WARN("paged attention: OLLAMA_PAGED_ENGINE=%s is neither stock nor exact: it is stock\n", engine);
    return false;
}

// Names of the device's images in a folder, in order.
std::set<std::string> images_in(const std::string &folder, int arch) {
    std::set<std::string> found;
    const std::string prefix = "sm_" + std::to_string(arch) + "-", suffix = ".cubin";
    DIR *open = opendir(folder.c_str());
    if (!open) return found;
    while (const dirent *entry = readdir(open)) {
        const std::string name = entry->d_name;
        const bool fits = name.size() > prefix.size() + suffix.size() && name.compare(0, prefix.size(), prefix) == 0 &&
                          name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
        if (fits) found.insert(name);
    }
    closedir(open);
    return found;
}

// FNV-1a, 64 bits: it tells builds apart and guards against nobody.
void add(uint64_t &digest, const std::string &bytes) {
    for (const char byte : bytes) digest = (digest ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
}

} // namespace

std::string read_image(const Engine &engine, const std::string &name) {
    std::ifstream file(engine.folder + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Once for each device. The name says what the bits of K/V depend on: this library's source and the kernels.
void choose_engine(Device &device) {
    if (device.engine.chosen) return;
    device.engine.chosen = true;
    if (!wanted()) return;
    ggml_backend_dev_props props;
    device.inner->iface.get_props(device.inner, &props);
    Engine &engine = device.engine;
    engine.arch = 10 * props.compute_major + props.compute_minor;
    Dl_info self;
    if (!dladdr(reinterpret_cast<void *>(&choose_engine), &self)) return;
    const std::string path(self.dli_fname), beside = path.substr(0, path.rfind('/') + 1);
    for (const std::string &folder : {beside + "../paged_attn", beside + "paged_attn"}) {
        engine.folder = folder;
        engine.images = images_in(folder, engine.arch);
        if (!engine.images.empty()) break;
    }
    if (engine.images.empty()) {
        GGML_LOG_WARN("paged attention: OLLAMA_PAGED_ENGINE=exact, and there are no kernels for %s, sm_%d, in %s: the "
                      "stock library's compute; `tiering patch --cuda stock` makes them\n",
                      device.inner->iface.get_name(device.inner), engine.arch, engine.folder.c_str());
        return;
    }
    uint64_t digest = 0xcbf29ce484222325u;
    add(digest, SHIM_SOURCES);
    for (const std::string &name : engine.images) {
        add(digest, name);
        add(digest, read_image(engine, name));
    }
    char text[32];
    std::snprintf(text, sizeof text, "exact.%016llx", static_cast<unsigned long long>(digest));
    engine.name = text;
    GGML_LOG_INFO("paged attention: %s computes attention by kernels of its own, %s, %zu images for sm_%d\n",
                  device.inner->iface.get_name(device.inner), text, engine.images.size(), engine.arch);
}

} // namespace shim
