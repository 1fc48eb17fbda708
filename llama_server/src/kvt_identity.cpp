#include "kvt_identity.h"

#include <algorithm>
#include <string_view>

namespace kvt {

namespace {

using std::string;
using std::string_view;

constexpr size_t most_name_bytes = 128; // docs/engine-protocol.md

// Of GGML and llama.cpp; of the devices' libraries (kernels by another architecture, TF32, workspaces, a part of the processors);
// of threads and of libraries of matrices.
constexpr string_view families[] = {
    "GGML_",     "LLAMA_",  "CUDA_",   "CUBLAS",  "CUDNN_",  "NVIDIA_", "HSA_",      "HIP_",           "HIPBLAS",
    "ROCBLAS_",  "ROCM_",   "ROCR_",   "TENSILE_", "MIOPEN_", "AMD_",   "GPU_",      "MUSA_",          "SYCL_",
    "ONEAPI_",   "ZE_",     "UR_",     "IGC_",    "VK_",     "RADV_",   "MESA_",     "ANV_",           "ASCEND_",
    "CANN_",     "OMP_",    "GOMP_",   "KMP_",    "MKL_",    "BLAS_",   "OPENBLAS_", "GOTO_",          "BLIS_",
    "VECLIB_",   "MTMD_",   "ATLAS_",  "DNNL_",   "ONEDNN_", "FLEXIBLAS", "ARMPL_", "XDNN_",    "GLIBC_TUNABLES",
};

// Where files lie, what is logged and how a server is started: no bit depends on it, and some differ with each start. Which
// devices there are has a name of its own in the namespace, and so has what llama-server's options say.
constexpr string_view harmless[] = {
    "GGML_BACKEND_PATH", "LLAMA_ARG_",      "LLAMA_API_KEY",    "LLAMA_CACHE",     "LLAMA_LOG_",      "LLAMA_OFFLINE",
    "LLAMA_MEDIA_MARKER",
    "CUDA_CACHE_",       "CUDA_COREDUMP_",  "CUDA_HOME",        "CUDA_MPS_LOG_",   "CUDA_MPS_PIPE_",  "CUDA_PATH",
    "CUDA_VERSION",      "CUBLAS_LOG",      "CUDNN_LOG",        "NVIDIA_DRIVER_",  "NVIDIA_REQUIRE_", "NVIDIA_PRODUCT_",
    "HIP_PATH",          "ROCM_HOME",       "ROCM_PATH",        "ROCBLAS_LAYER",   "ROCBLAS_LOG_",    "ROCBLAS_VERBOSE",
    "MIOPEN_ENABLE_LOG", "HSA_COREDUMP_",   "AMD_LOG_",         "ONEAPI_ROOT",     "MKL_VERBOSE",     "VK_LOADER_DEBUG",
    "OMP_DISPLAY_",      "OMP_WAIT_POLICY", "KMP_BLOCKTIME",    "KMP_WARNINGS",    "DNNL_VERBOSE",    "ONEDNN_VERBOSE",
    "ASCEND_HOME",       "LLAMA_SERVER_",   "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
};

bool begins(string_view text, string_view with) { return text.substr(0, with.size()) == with; }

template <size_t N> bool is_one(string_view name, const string_view (&of)[N]) {
    return std::any_of(of, of + N, [name](string_view one) { return begins(name, one); });
}

bool decides(string_view name) {
    return is_one(name, families) && !is_one(name, harmless) && name.find("VISIBLE_DEVICES") == string_view::npos;
}

} // namespace

string engine_name(const string & version, const string & build) {
    const string end = "+" + build;
    const string whole = "llama-server/" + version;
    return whole.substr(0, most_name_bytes - std::min(end.size(), most_name_bytes)) + end;
}

std::vector<string> bit_variables(const char * const * environment) {
    std::vector<string> found;
    for (; *environment != nullptr; ++environment) {
        const string_view text = *environment;
        if (decides(text.substr(0, text.find('=')))) {
            found.emplace_back(text);
        }
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

} // namespace kvt
