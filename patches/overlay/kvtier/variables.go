package kvtier

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
)

// Variables that may change which code computes, in how many parts, or how exactly; docs/format.md has the table. llama-server's
// tiering has the same lists (llama_server/src/kvt_identity.cpp).
var (
	// families are how their names begin: of GGML and llama.cpp, of the devices' libraries and drivers, of threads, and of
	// libraries of matrices.
	families = []string{
		"GGML_", "LLAMA_", "MTMD_", "CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_", "HSA_", "HIP_", "HIPBLAS", "ROCBLAS_", "ROCM_", "ROCR_",
		"TENSILE_", "MIOPEN_", "AMD_", "GPU_", "MUSA_", "SYCL_", "ONEAPI_", "ZE_", "UR_", "IGC_", "VK_", "RADV_", "MESA_",
		"ANV_", "ASCEND_", "CANN_", "OMP_", "GOMP_", "KMP_", "MKL_", "BLAS_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_",
		"ATLAS_", "DNNL_", "ONEDNN_", "FLEXIBLAS", "ARMPL_", "XDNN_", "GLIBC_TUNABLES",
	}

	// harmless is how those of them begin that say where files lie, what is logged, how a server is started, which devices are
	// visible or how a thread waits. GGML itself sets KMP_BLOCKTIME, in a build with OpenMP.
	harmless = []string{
		"GGML_BACKEND_PATH", "LLAMA_ARG_", "LLAMA_API_KEY", "LLAMA_CACHE", "LLAMA_LOG_", "LLAMA_OFFLINE", "LLAMA_MEDIA_MARKER", "CUDA_CACHE_",
		"CUDA_COREDUMP_", "CUDA_HOME", "CUDA_MPS_LOG_", "CUDA_MPS_PIPE_", "CUDA_PATH", "CUDA_VERSION", "CUBLAS_LOG",
		"CUDNN_LOG", "NVIDIA_DRIVER_", "NVIDIA_REQUIRE_", "NVIDIA_PRODUCT_", "HIP_PATH", "ROCM_HOME", "ROCM_PATH",
		"ROCBLAS_LAYER", "ROCBLAS_LOG_", "ROCBLAS_VERBOSE", "MIOPEN_ENABLE_LOG", "HSA_COREDUMP_", "AMD_LOG_", "ONEAPI_ROOT",
		"MKL_VERBOSE", "VK_LOADER_DEBUG", "OMP_DISPLAY_", "KMP_WARNINGS", "DNNL_VERBOSE", "ONEDNN_VERBOSE", "ASCEND_HOME",
		"KMP_BLOCKTIME", "OMP_WAIT_POLICY", "LLAMA_SERVER_", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
	}
)

// variables is a digest of those that are set, "" where none is. Which devices are visible is not among them: those that compute
// have a name of their own.
func variables(environment []string) string {
	var set []string
	for _, variable := range environment {
		name, _, _ := strings.Cut(variable, "=")
		begins := func(with string) bool { return strings.HasPrefix(name, with) }
		if slices.ContainsFunc(families, begins) && !slices.ContainsFunc(harmless, begins) && !strings.Contains(name, "VISIBLE_DEVICES") {
			set = append(set, variable+"\n")
		}
	}
	if len(set) == 0 {
		return ""
	}
	slices.Sort(set)
	digest := sha256.Sum256([]byte(strings.Join(slices.Compact(set), "")))
	return hex.EncodeToString(digest[:8])
}
