package llama

// #include "ggml.h"
// #include "ggml-backend.h"
// #include "llama.h"
// #include "kvtier.h"
import "C"

import "unsafe"

// The cells of a context's K/V cache as the KV tiering sees them (kvtier.h). Locking: as for Decode and the KvCache
// functions, the caller serialises everything here with them.

// KVTierContext is what K/V depends on beside model and tokens.
type KVTierContext struct {
	Children       int // caches: one, or a full one and one of sliding windows
	Cells          int // of one sequence
	Streams        int
	FlashAttention bool
	ExactShift     bool   // a shift of some rows leaves the bits of all others as they are
	Threads        int    // that compute a prompt
	RoPE           string // as resolved
}

// KVTierDescribe says why the rows of this context can't be tiered, or "".
func (c *Context) KVTierDescribe() (KVTierContext, string) {
	var info C.struct_kvtier_context
	if reason := C.kvtier_describe(c.c, &info); reason != nil {
		return KVTierContext{}, C.GoString(reason)
	}
	return KVTierContext{
		Children: int(info.children), Cells: int(info.cells), Streams: int(info.streams),
		FlashAttention: bool(info.flash_attention), ExactShift: bool(info.exact_shift), Threads: int(info.threads),
		RoPE: C.GoString(&info.rope[0]),
	}, ""
}

// KVTierTensor is K or V of one layer, of all sequences.
type KVTierTensor struct{ t *C.struct_ggml_tensor }

// KVTierType is GGML's name of the element type, "f16".
func (t KVTierTensor) KVTierType() string { return C.GoString(C.ggml_type_name(t.t._type)) }

// KVTierPointer is GGML's, for those who know it by another package.
func (t KVTierTensor) KVTierPointer() unsafe.Pointer { return unsafe.Pointer(t.t) }

// KVTierHost returns the tensor's memory if it lies in a buffer that the CPU can access, else nil.
func (t KVTierTensor) KVTierHost() []byte {
	if t.t.buffer == nil || t.t.data == nil || !bool(C.ggml_backend_buffer_is_host(t.t.buffer)) {
		return nil
	}
	return unsafe.Slice((*byte)(t.t.data), int(C.ggml_nbytes(t.t)))
}

// KVTierGet copies bytes from offset on out of the tensor.
func (t KVTierTensor) KVTierGet(offset int, dst []byte) {
	if len(dst) > 0 {
		C.ggml_backend_tensor_get(t.t, unsafe.Pointer(&dst[0]), C.size_t(offset), C.size_t(len(dst)))
	}
}

// KVTierSet copies src into the tensor from offset on.
func (t KVTierTensor) KVTierSet(offset int, src []byte) {
	if len(src) > 0 {
		C.ggml_backend_tensor_set(t.t, unsafe.Pointer(&src[0]), C.size_t(offset), C.size_t(len(src)))
	}
}

// KVTierLayer is K and V of one layer. A sequence's rows lie in one stream; the bytes of a stream follow those of the one
// before.
type KVTierLayer struct {
	Child, Layer                int
	Window                      int  // how many positions attention looks back over, its own included; 0: all
	Chunked                     bool // … or from the last multiple of Window on
	KVHeads, KHeadDim, VHeadDim int
	VTransposed                 bool // [element][cell] instead of [cell][element]
	KRowBytes, VRowBytes        int
	KStreamBytes, VStreamBytes  int
	K, V                        KVTierTensor
	Device                      KVTierDevice // that computes the layer
}

// KVTierDevice is what GGML says of a device.
type KVTierDevice struct {
	CPU                        bool
	Library, Description       string
	ComputeMajor, ComputeMinor int
	DriverMajor, DriverMinor   int
}

const kvTierMaxLayers = 1024

// KVTierLayers returns every layer that has K and V, those of the first cache first, or nil if one is not as expected.
func (c *Context) KVTierLayers() []KVTierLayer {
	raw := make([]C.struct_kvtier_layer, kvTierMaxLayers)
	n := int(C.kvtier_layers(c.c, &raw[0], kvTierMaxLayers))
	if n <= 0 {
		return nil
	}
	layers := make([]KVTierLayer, n)
	for i, r := range raw[:n] {
		layers[i] = KVTierLayer{
			Child: int(r.child), Layer: int(r.layer), Window: int(r.window), Chunked: bool(r.chunked),
			KVHeads: int(r.kv_heads), KHeadDim: int(r.k_dim), VHeadDim: int(r.v_dim),
			VTransposed: bool(r.v_transposed), KRowBytes: int(r.k_row_bytes), VRowBytes: int(r.v_row_bytes),
			KStreamBytes: int(r.k_stream_bytes), VStreamBytes: int(r.v_stream_bytes),
			K: KVTierTensor{r.k}, V: KVTierTensor{r.v}, Device: kvTierDevice(r.device),
		}
	}
	return layers
}

func kvTierDevice(device C.ggml_backend_dev_t) KVTierDevice {
	if device == nil || C.ggml_backend_dev_type(device) == C.GGML_BACKEND_DEVICE_TYPE_CPU {
		return KVTierDevice{CPU: true}
	}
	var props C.struct_ggml_backend_dev_props
	C.ggml_backend_dev_get_props(device, &props)
	return KVTierDevice{
		Library: C.GoString(props.library), Description: C.GoString(props.description),
		ComputeMajor: int(props.compute_major), ComputeMinor: int(props.compute_minor),
		DriverMajor: int(props.driver_major), DriverMinor: int(props.driver_minor),
	}
}

// KVTierCells returns the cells of a sequence in ascending order, and the position in each; nil where that can't be told.
func (c *Context) KVTierCells(child, seq, size int) (cells, positions []int32) {
	cells, positions = make([]int32, size), make([]int32, size)
	n := int(C.kvtier_cells(c.c, C.int(child), C.int32_t(seq), (*C.int32_t)(&cells[0]), (*C.int32_t)(&positions[0]), C.int(size)))
	if n < 0 {
		return nil, nil
	}
	return cells[:n], positions[:n]
}

// KVTierFind returns where llama.cpp itself would put n more positions of a sequence, from from on, or nil.
func (c *Context) KVTierFind(child, seq, from, n int) []int32 {
	if n <= 0 {
		return nil
	}
	cells := make([]int32, n)
	if !bool(C.kvtier_find(c.c, C.int(child), C.int32_t(seq), C.int32_t(from), C.int(n), (*C.int32_t)(&cells[0]))) {
		return nil
	}
	return cells
}

// KVTierOccupy gives cells to a sequence: cells[i] holds position from+i. False, and nothing is changed, where they are not
// what KVTierFind says.
func (c *Context) KVTierOccupy(child, seq, from int, cells []int32) bool {
	return len(cells) > 0 && bool(C.kvtier_occupy(c.c, C.int(child), C.int32_t(seq), C.int32_t(from), C.int(len(cells)),
		(*C.int32_t)(&cells[0])))
}

// KVTierSync waits for everything that was launched: a batch without outputs returns before a device has finished it.
func (c *Context) KVTierSync() { C.llama_synchronize(c.c) }
