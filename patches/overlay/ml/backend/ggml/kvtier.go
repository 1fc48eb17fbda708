package ggml

// #include "ggml.h"
// #include "ggml-backend.h"
// // The CPU backend may be a library that was loaded at run time: it is asked by name.
// static const char * kvtier_attention(ggml_backend_dev_t device) {
//     const char * (*state)(void) =
//         (const char * (*)(void)) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "kvtier_attn_state");
//     return state ? state() : "";
// }
import "C"

import "unsafe"

// KVTierHost returns the tensor's memory if it lies in a buffer that the CPU can access, else nil. Implements
// kvcache.KVTierTensor.
func (t *Tensor) KVTierHost() []byte {
	buffer := t.t.buffer
	if buffer == nil || t.t.data == nil || !bool(C.ggml_backend_buffer_is_host(buffer)) {
		return nil
	}
	return unsafe.Slice((*byte)(t.t.data), int(C.ggml_nbytes(t.t)))
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
func (b *Backend) KVTierAttention() string {
	device := C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
	if device == nil {
		return ""
	}
	return C.GoString(C.kvtier_attention(device))
}
