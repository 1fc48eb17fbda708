package ggml

// #include "ggml.h"
// #include "ggml-backend.h"
// // The CPU backend may be a library that was loaded at run time: it is asked by name.
// static const char * kvtier_attention(ggml_backend_dev_t device) {
//     const char * (*state)(void) =
//         (const char * (*)(void)) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "kvtier_attn_state");
//     return state ? state() : "";
// }
// static const struct ggml_backend_feature * kvtier_features(ggml_backend_dev_t device) {
//     ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
//     ggml_backend_get_features_t features =
//         (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
//     return features ? features(reg) : NULL;
// }
// // RoPE and the tables of activations go through the C library's functions, which it chooses by the processor.
// #include <stdio.h>
// #ifdef __GLIBC__
// #include <gnu/libc-version.h>
// #endif
// static void kvtier_libc(char * text, size_t size) {
//     const char * version = "";
//     const char * fma = "";
// #ifdef __GLIBC__
//     version = gnu_get_libc_version();
// #endif
// #if defined(__x86_64__) && defined(__GNUC__)
//     __builtin_cpu_init();
//     fma = __builtin_cpu_supports("fma") ? " fma" : "";
// #endif
//     snprintf(text, size, "%s%s", version, fma);
// }
// static const struct ggml_backend_feature * kvtier_next(const struct ggml_backend_feature * feature) { return feature + 1; }
// // GGML's own buffers of the CPU name no device.
// static bool kvtier_on_device(ggml_backend_buffer_t buffer) {
//     ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
//     if (device == NULL) {
//         return false;
//     }
//     enum ggml_backend_dev_type type = ggml_backend_dev_type(device);
//     return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
// }
import "C"

import (
	"strings"
	"unsafe"
)

// KVTierHost returns the tensor's memory if it lies in a buffer that the CPU can access, else nil. Implements
// rows.Tensor.
func (t *Tensor) KVTierHost() []byte {
	buffer := t.t.buffer
	if buffer == nil || t.t.data == nil || !bool(C.ggml_backend_buffer_is_host(buffer)) {
		return nil
	}
	return unsafe.Slice((*byte)(t.t.data), int(C.ggml_nbytes(t.t)))
}

// KVTierOnDevice reports whether a GPU writes the tensor, in a stream that the host has to wait for. Its memory may be such as
// the CPU can access, too: pinned memory of the host, or what an integrated GPU shares with it. Implements kvcache.tierTensor.
func (t *Tensor) KVTierOnDevice() bool {
	return t.t.buffer != nil && bool(C.kvtier_on_device(t.t.buffer))
}

// KVTierGet copies bytes from offset on out of the tensor.
func (t *Tensor) KVTierGet(offset int, dst []byte) {
	if len(dst) > 0 {
		C.ggml_backend_tensor_get(t.t, unsafe.Pointer(&dst[0]), C.size_t(offset), C.size_t(len(dst)))
	}
}

// KVTierSet copies src into the tensor from offset on.
func (t *Tensor) KVTierSet(offset int, src []byte) {
	if len(src) > 0 {
		C.ggml_backend_tensor_set(t.t, unsafe.Pointer(&src[0]), C.size_t(offset), C.size_t(len(src)))
	}
}

// KVTierSync waits for everything that was launched. A batch without outputs returns before the device has finished it,
// and tensor get and set are not ordered with the device's compute streams.
func (b *Backend) KVTierSync() {
	b.schedMu.Lock()
	defer b.schedMu.Unlock()
	C.ggml_backend_sched_synchronize(b.sched)
}

// KVTierAttention says how the CPU backend computes attention, in the words of ggml-cpu/kvtier-attn.h.
func KVTierAttention() string {
	device := C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
	if device == nil {
		return ""
	}
	return C.GoString(C.kvtier_attention(device))
}

// KVTierCPU names the instruction sets that the CPU backend in use was compiled for, "AVX,AVX2,FMA" as GGML reports
// them; "" where it does not say. Of the libraries that lie beside each other (haswell, icelake, …) GGML loads the best
// that the processor runs, and the results of two of them differ in their last bits.
func KVTierCPU() string {
	device := C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
	if device == nil {
		return ""
	}
	var features []string
	for f := C.kvtier_features(device); f != nil && f.name != nil; f = C.kvtier_next(f) {
		name, value := C.GoString(f.name), C.GoString(f.value)
		if value != "1" {
			name += ":" + value
		}
		features = append(features, name)
	}
	return strings.Join(features, ",")
}

// KVTierLibc names the C library whose mathematical functions the CPU backend calls, "2.36 fma", as far as that can be told.
func KVTierLibc() string {
	var text [64]C.char
	C.kvtier_libc(&text[0], C.size_t(len(text)))
	return C.GoString(&text[0])
}

// The same as methods, for those who know the backend as an interface.

func (b *Backend) KVTierAttention() string { return KVTierAttention() }

func (b *Backend) KVTierCPU() string { return KVTierCPU() }

func (b *Backend) KVTierLibc() string { return KVTierLibc() }
