// Engine 2 before it computes: when it is chosen, with which kernels, and what a driver that refuses leaves behind.
#include "rig.h"

#include <filesystem>
#include <fstream>
#include <map>

namespace {

namespace fs = std::filesystem;

const std::string kImage = "sm_89-64x64-f16-f16-rows2-align16.cubin", kOther = "sm_89-128x128-f16-f16-rows2-align16.cubin";
const std::string kGood = "version 2 64x64", kStale = "version 1 64x64";

// The library once more, out of a folder of its own, beside these files of kernels: an engine is chosen once for each device.
using Images = std::map<std::string, std::string>;
struct Chosen {
    explicit Chosen(const Images &images) {
        static int number = 0;
        const fs::path all = std::getenv("SHIM_TEST_FOLDER");
        folder = all / ("engine" + std::to_string(number++));
        fs::remove_all(folder);
        fs::create_directories(folder / "paged_attn");
        fs::copy_file(all / "libggml-cuda-tiering.so", folder / "libggml-cuda-tiering.so");
        for (const char *link : {"libggml-cuda.so", "libcuda.so.1"}) fs::create_symlink(all / "libggml-cuda.so", folder / link);
        for (const auto &[file, bytes] : images) put(file, bytes);
        void *shim = dlopen((folder / "libggml-cuda-tiering.so").c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!shim) std::printf("%s\n", dlerror());
        library.reg = reinterpret_cast<ggml_backend_init_t>(dlsym(shim, "ggml_backend_init"))();
        setenv("OLLAMA_PAGED_ENGINE", "exact", 1);
        said.clear();
        library.recorder->loaded.clear();
        paged_type();
        void *function = library.reg->iface.get_proc_address(library.reg, "kvpaged_engine");
        name = reinterpret_cast<const char *(*)(ggml_backend_dev_t)>(function)(device());
    }
    ~Chosen() {
        unsetenv("OLLAMA_PAGED_ENGINE");
        library.recorder->refused.clear();
        library.recorder->driver = 13000;
        fs::remove_all(folder);
    }
    void put(const std::string &file, const std::string &bytes) const { std::ofstream(folder / "paged_attn" / file) << bytes; }
    bool stock() const { return name.empty() && said.find("the stock library's compute") != std::string::npos; }

    fs::path folder;
    std::string name;
};

// One attention over paged K/V that there are kernels for.
struct Served : Model {
    Served() {
        ggml_tensor *kv[2];
        for (ggml_tensor *&seen : kv) {
            ggml_tensor *made = ggml_new_tensor_3d(context, GGML_TYPE_F16, 64, 2, kCells);
            ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(paged_type(), ggml_nbytes(made));
            buffers.push_back(buffer);
            ggml_backend_tensor_alloc(buffer, made, ggml_backend_buffer_get_base(buffer));
            seen = ggml_permute(context, made, 0, 2, 1, 3);
        }
        ggml_tensor *q = ggml_new_tensor_3d(context, GGML_TYPE_F32, 64, 1, 4);
        ggml_tensor *node = add(ggml_flash_attn_ext(context, q, kv[0], kv[1], nullptr, 1.0f, 0, 0), "a0");
        q->data = node->data = somewhere;
    }
    alignas(16) char somewhere[1 << 10];
    ggml_status reserve(const Backend &backend) { return backend->iface.graph_reserve(backend.get(), graph, true); }
};

size_t count(const std::string &call) {
    const auto &calls = library.recorder->calls;
    return static_cast<size_t>(std::count(calls.begin(), calls.end(), call));
}

} // namespace

TEST(kernels_that_the_driver_takes_are_chosen) {
    Chosen chosen(Images{{kImage, kGood}, {kOther, "version 2 128x128"}});
    EXPECT(chosen.name.find("exact.") == 0, "%s", said.c_str());
    EXPECT(library.recorder->loaded.size() == 2, "each is tried: %zu", library.recorder->loaded.size());
    EXPECT(library.recorder->contexts == 0, "a device that may be reset is held");
    EXPECT(Chosen(Images{{kImage, kGood}}).name != chosen.name, "other kernels, other bits");
    EXPECT(Chosen(Images{{kImage, kGood + " rebuilt"}, {kOther, "version 2 128x128"}}).name != chosen.name, "other bytes");
}

TEST(files_of_other_gpus_and_what_is_no_image_are_not_looked_at) {
    Chosen chosen(Images{{kImage, kGood}, {"sm_80" + kImage.substr(5), kStale}, {"sm_89-notes.cubin", kStale}, {kImage + ".new", kStale},
                   {"sm_89-64x64-f16-f64-rows2-align16.cubin", kStale}});
    EXPECT(chosen.name == Chosen(Images{{kImage, kGood}}).name, "%s", said.c_str());
}

TEST(without_kernels_the_stock_library_computes) {
    EXPECT(Chosen(Images{}).stock(), "%s", said.c_str());
    EXPECT(Chosen(Images{{"sm_80" + kImage.substr(5), kGood}}).stock(), "of another GPU: %s", said.c_str());
}

TEST(a_driver_that_is_too_old_is_noticed_before_the_engine_has_a_name) {
    library.recorder->driver = 11080;
    Chosen chosen(Images{{kImage, kGood}});
    EXPECT(chosen.stock(), "%s: %s", chosen.name.c_str(), said.c_str());
    EXPECT(said.find("it is for CUDA 11.8, 12.0 is needed") != std::string::npos, "%s", said.c_str());
}

TEST(kernels_of_another_version_are_noticed_before_the_engine_has_a_name) {
    for (const std::string &bad : {kStale, std::string(), std::string("version 2 128x128")}) {
        Chosen chosen(Images{{kImage, bad}, {kOther, "version 2 128x128"}});
        EXPECT(chosen.stock(), "%s: %s", chosen.name.c_str(), said.c_str());
        EXPECT(said.find(kImage) != std::string::npos, "which: %s", said.c_str());
        EXPECT(library.recorder->contexts == 0, "a device is held");
        Backend backend = new_backend();
        EXPECT(Served().reserve(backend) == GGML_STATUS_SUCCESS, "by the stock library");
    }
}

TEST(what_computes_is_what_the_name_is_of) {
    Chosen chosen(Images{{kImage, kGood}});
    chosen.put(kImage, kGood + " rebuilt"); // `tiering patch` while a model is loaded
    Backend backend = new_backend();
    EXPECT(Served().reserve(backend) == GGML_STATUS_SUCCESS, "%s", said.c_str());
    EXPECT(library.recorder->loaded.back() == kGood, "%s", library.recorder->loaded.back().c_str());
}

TEST(an_opening_that_fails_halfway_leaves_nothing_half_open) {
    Chosen chosen(Images{{kImage, kGood}});
    for (const char *call : {"cuStreamCreate", "cuMemAlloc"}) {
        Backend backend = new_backend();
        Served model;
        library.recorder->calls.clear();
        library.recorder->refused = call;
        EXPECT(model.reserve(backend) == GGML_STATUS_ALLOC_FAILED, "%s", call);
        EXPECT(library.recorder->contexts == 0, "%s: the device is still held", call);
        EXPECT(count("cuStreamDestroy") == (std::string(call) == "cuMemAlloc" ? 1 : 0), "%s: the stream", call);
        library.recorder->refused.clear();
        EXPECT(model.reserve(backend) == GGML_STATUS_SUCCESS, "%s: it is there again", call);
        EXPECT(count("cuStreamCreate") == 2, "%s: a stream is made, not taken for made: %zu", call, count("cuStreamCreate"));
        library.recorder->calls.clear();
        EXPECT(backend->iface.graph_compute(backend.get(), model.graph, 7) == GGML_STATUS_SUCCESS, "%s", call);
        EXPECT(count("cuLaunchKernel") > 0 && count("cuLaunchKernel in the default stream") == 0, "%s", call);
        backend.reset();
        EXPECT(library.recorder->contexts == 0, "%s: given back", call);
    }
}
