package kvtier

import (
	"os"
	"strings"
	"testing"
)

func card(description string, driver int) Device {
	return Device{
		Library: "CUDA", Description: description, ComputeMajor: 8, ComputeMinor: 6, DriverMajor: driver,
		Libraries: []string{"/opt/lib/ollama", "/opt/lib/ollama/cuda_v12"},
	}
}

// unset takes away what the namespace counts of this process's variables.
func unset(t *testing.T) {
	t.Helper()
	for _, variable := range os.Environ() {
		if name, value, _ := strings.Cut(variable, "="); variables([]string{variable}) != "" {
			t.Setenv(name, value) // so that it is put back
			os.Unsetenv(name)
		}
	}
}

func TestWhatComputesAModelIsSaidInFull(t *testing.T) {
	unset(t)
	one, other := card("RTX 3090", 12), card("RTX 3060", 12)
	said := Computing{
		CPU: "AVX2,FMA", Libc: "2.36", Devices: []Device{one, other, one},
		Places: []string{OnHost, other.Name(), one.Name(), OnDevice, "a card that is not listed"},
	}.Extra()
	want := "devices=CUDA 8.6 RTX 3060, driver 12.0, ollama+cuda_v12 | CUDA 8.6 RTX 3090, driver 12.0, ollama+cuda_v12" +
		";cpu=AVX2,FMA;libc=2.36;rows=h01dd"
	if said != want {
		t.Errorf("%s, want %s", said, want)
	}
	if got := (Computing{Places: []string{OnHost}}).Extra(); got != "devices=none;rows=h" {
		t.Errorf("nothing but a CPU that says nothing of itself: %s", got)
	}
}

func TestWhatComputesAttentionOnDevicesIsSaidWhereItIsNotTheirLibrary(t *testing.T) {
	unset(t)
	computing := Computing{Libc: "2.36", Places: []string{OnHost}}
	if got := computing.Extra(); got != "devices=none;libc=2.36;rows=h" {
		t.Error(got)
	}
	computing.Attention = "exact.0123456789abcdef"
	if got := computing.Extra(); got != "devices=none;libc=2.36;paged=exact.0123456789abcdef;rows=h" {
		t.Error(got)
	}
}

func TestVariablesThatChangeBitsAreInTheNamespace(t *testing.T) {
	unset(t)
	computing := Computing{Libc: "2.36", Places: []string{OnHost}}
	const without = "devices=none;libc=2.36;rows=h"
	seen := map[string]string{without: "nothing is set"}
	for _, variable := range []string{
		"GGML_CUDA_DISABLE_FUSION=1", "GGML_CUDA_DISABLE_FUSION=", "GGML_CUDA_GRAPH_OPT=1", "GGML_CUDA_FORCE_MMQ=1", "GGML_VK_DISABLE_F16=1",
		"HSA_OVERRIDE_GFX_VERSION=10.3.0", "HSA_OVERRIDE_GFX_VERSION=11.0.0", "HSA_OVERRIDE_GFX_VERSION_0=10.3.0", "NVIDIA_TF32_OVERRIDE=1",
		"NVIDIA_TF32_OVERRIDE=0", "CUBLAS_WORKSPACE_CONFIG=:4096:8", "CUBLASLT_WORKSPACE_SIZE=1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
		"CUDA_FORCE_PTX_JIT=1", "OMP_NUM_THREADS=2", "OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true", "GOMP_CPU_AFFINITY=0", "KMP_AFFINITY=disabled",
		"ROCBLAS_USE_HIPBLASLT=1", "TENSILE_DB=1", "HSA_CU_MASK=0:0-3", "RADV_PERFTEST=cswave32",
		"OPENBLAS_CORETYPE=Haswell", "MKL_CBWR=AVX2", "DNNL_MAX_CPU_ISA=AVX2", "VK_ICD_FILENAMES=/a.json", "LLAMA_ATTN_ROT_DISABLE=1",
		"GLIBC_TUNABLES=glibc.cpu.hwcaps=-FMA",
	} {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
		said := computing.Extra()
		if other, known := seen[said]; known {
			t.Errorf("%s: what is said is that of %s: %s", variable, other, said)
		}
		if value != "" && strings.Contains(said, value) && len(value) > 3 {
			t.Errorf("%s can be read in %s", variable, said)
		}
		seen[said] = variable
		os.Unsetenv(name)
	}
	for _, variable := range []string{
		"CUDA_VISIBLE_DEVICES=0", "GGML_VK_VISIBLE_DEVICES=1", "HIP_VISIBLE_DEVICES=0", "GGML_BACKEND_PATH=/a", "OMP_WAIT_POLICY=active",
		"KMP_BLOCKTIME=200", "NVIDIA_VISIBLE_DEVICES=all", "CUDA_CACHE_PATH=/c", "CUDA_PATH=/c", "LLAMA_ARG_PORT=1", "XGGML_A=1", "OLLAMA_HOST=a", "PATH_OMP_=1",
		"GPU_DEVICE_ORDINAL=1", "ZE_AFFINITY_MASK=0", "LLAMA_SERVER_SLOTS=1",
	} {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	if got := computing.Extra(); got != without {
		t.Errorf("%s, want %s: nothing that is set changes bits", got, without)
	}
}

func TestTheOrderOfVariablesSaysNothing(t *testing.T) {
	a, b := []string{"OMP_DYNAMIC=1", "GGML_A=1"}, []string{"HOME=/", "GGML_A=1", "OMP_DYNAMIC=1", "GGML_A=1"}
	if one, other := variables(a), variables(b); one != other || one == "" {
		t.Errorf("%q and %q", one, other)
	}
	if variables([]string{"GGML_A=1"}) == variables(a) {
		t.Error("one of two variables says what both do")
	}
}

func TestEveryWordOfADeviceCounts(t *testing.T) {
	names := map[string]bool{card("RTX 3090", 12).Name(): true}
	for _, change := range []func(*Device){
		func(d *Device) { d.Library = "ROCm" },
		func(d *Device) { d.Description = "RTX 3060" },
		func(d *Device) { d.ComputeMajor++ },
		func(d *Device) { d.ComputeMinor++ },
		func(d *Device) { d.DriverMajor++ },
		func(d *Device) { d.DriverMinor++ },
		func(d *Device) { d.Libraries = d.Libraries[:1] },
	} {
		d := card("RTX 3090", 12)
		change(&d)
		if names[d.Name()] {
			t.Errorf("%s is another's name", d.Name())
		}
		names[d.Name()] = true
	}
	if strings.Contains(card("", 1).Name(), "/opt") {
		t.Error("where the libraries lie is not what they are")
	}
}
