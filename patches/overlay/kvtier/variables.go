package kvtier

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
)

// Variables that change which code computes, in how many parts, or how exactly: of GGML, and of the libraries and drivers that it
// computes with. docs/format.md has the table; llama-server's tiering has the same list (llama_server/src/llama/kvt_describe.cpp).
var (
	computing = []string{ // beginnings of their names
		"GGML_",
		"CUBLAS_", "CUBLASLT_", "CUDA_DISABLE_JIT", "CUDA_DISABLE_PTX_JIT", "CUDA_FORCE_JIT", "CUDA_FORCE_PTX_JIT", "CUDA_MPS_",
		"NVIDIA_TF32_OVERRIDE",
		"HIPBLAS_", "HIPBLASLT_", "HSA_CU_MASK", "HSA_OVERRIDE_GFX_VERSION", "ROCBLAS_", "ROC_GLOBAL_CU_MASK", "TENSILE_",
		"ANV_", "RADV_", "VK_DRIVER_FILES", "VK_ICD_FILENAMES",
		"GOMP_", "KMP_", "OMP_",
		"BLIS_", "DNNL_", "MKL_", "ONEDNN_", "OPENBLAS_",
	}

	// notComputing are excepted: where a library lies, and how a thread waits. GGML sets the last one itself.
	notComputing = []string{"GGML_BACKEND_PATH", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"}
)

// variables is a digest of those that are set, "" where none is. Which devices are visible is not among them: those that compute
// have a name of their own.
func variables(environment []string) string {
	var set []string
	for _, variable := range environment {
		name, _, _ := strings.Cut(variable, "=")
		begins := func(with string) bool { return strings.HasPrefix(name, with) }
		if slices.ContainsFunc(computing, begins) && !slices.Contains(notComputing, name) && !strings.Contains(name, "VISIBLE_DEVICES") {
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
