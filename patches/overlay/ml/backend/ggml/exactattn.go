package ggml

// #include "ggml-backend.h"
// // The CPU backend may be a library that was loaded at run time: it is asked by name.
// static const char * exactattn_state_of(ggml_backend_dev_t device) {
//     const char * (*state)(void) =
//         (const char * (*)(void)) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "exactattn_state");
//     return state ? state() : "";
// }
import "C"

// ExactAttnState says how the CPU backend computes attention, in the words of ggml-cpu/exactattn.h.
func ExactAttnState() string {
	device := C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
	if device == nil {
		return ""
	}
	return C.GoString(C.exactattn_state_of(device))
}

// ExactAttnState is the same as a method, for those who know the backend as an interface.
func (b *Backend) ExactAttnState() string { return ExactAttnState() }
