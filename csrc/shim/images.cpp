// Which engine computes attention, and the files of csrc's kernels for a device: `tiering patch --cuda stock` makes them
// (ollama_tiering/kernels/images.py), in a folder `paged_attn` beside the folder of the stock library, or in it.
#include "exact.h"

#include "../cuda/host/device.h"

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

std::string bytes_of(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The device's images in a folder, by their names. They are read once: what the digest is of is what is computed with,
// also if the next patch replaces the folder while a model is loaded.
std::map<std::string, std::string> images_in(const std::string &folder, int arch) {
    std::map<std::string, std::string> found;
    const std::string prefix = "sm_" + std::to_string(arch) + "-";
    DIR *open = opendir(folder.c_str());
    if (!open) return found;
    while (const dirent *entry = readdir(open)) {
        const std::string name = entry->d_name;
        pa_shape shape;
        if (!name.compare(0, prefix.size(), prefix) && shape_of(name, shape)) found[name] = bytes_of(folder + "/" + name);
    }
    closedir(open);
    return found;
}

// FNV-1a, 64 bits: it tells builds apart and guards against nobody.
void add(uint64_t &digest, const std::string &bytes) {
    for (const char byte : bytes) digest = (digest ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
}

// Whether the driver takes the device and every image: a plan of each is made. To the planner a plan that cannot be made
// is memory that is missing, and it would move the layers to the CPU; and the name would be in a namespace already.
pa_status check(const Device &device, std::string &what) {
    what = "the driver";
    pa_cuda_device *gpu = nullptr;
    PA_TRY(pa_cuda_open(device.ordinal, &gpu));
    pa_status status = PA_OK;
    for (auto image = device.engine.images.begin(); image != device.engine.images.end() && !status; ++image) {
        what = image->first;
        pa_shape shape;
        shape_of(what, shape);
        pa_cuda_plan *plan = nullptr;
        status = pa_cuda_plan_create(gpu, &shape, 1, image->second.data(), image->second.size(), &plan);
        pa_cuda_plan_destroy(plan);
    }
    pa_cuda_close(gpu); // its backends open it again: until then Ollama may reset the device
    return status;
}

} // namespace

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
    const std::string folder = beside + "../paged_attn";
    engine.images = images_in(folder, engine.arch);
    if (engine.images.empty()) engine.images = images_in(beside + "paged_attn", engine.arch);
    if (engine.images.empty()) {
        GGML_LOG_WARN("paged attention: OLLAMA_PAGED_ENGINE=exact, and there are no kernels for %s, sm_%d, in %s: the "
                      "stock library's compute; `tiering patch --cuda stock` makes them\n",
                      device.inner->iface.get_name(device.inner), engine.arch, folder.c_str());
        return;
    }
    std::string what;
    if (check(device, what)) {
        GGML_LOG_WARN("paged attention: OLLAMA_PAGED_ENGINE=exact, and the kernels for %s cannot be used (%s: %s): the stock "
                      "library's compute; `tiering patch --cuda stock` makes them anew\n",
                      device.inner->iface.get_name(device.inner), what.c_str(), pa_cuda_last_error());
        engine.images.clear();
        return;
    }
    uint64_t digest = 0xcbf29ce484222325u;
    add(digest, SHIM_SOURCES);
    for (const auto &[name, bytes] : engine.images) {
        add(digest, name);
        add(digest, bytes);
    }
    char text[32];
    std::snprintf(text, sizeof text, "exact.%016llx", static_cast<unsigned long long>(digest));
    engine.name = text;
    GGML_LOG_INFO("paged attention: %s computes attention by kernels of its own, %s, %zu images for sm_%d\n",
                  device.inner->iface.get_name(device.inner), text, engine.images.size(), engine.arch);
}

} // namespace shim
