package ggml

// #include "kvtier_columns.h"
// static bool kvtier_copies_columns(void * tensor) { return kvt_device_of_columns((struct ggml_tensor *) tensor) != NULL; }
import "C"

import (
	"sync"
	"unsafe"
)

// A device has one queue and one staging buffer for this; rows are copied by several goroutines.
var kvtierColumnsMu sync.Mutex

// KVTierCopiesColumns reports whether the device that has a tensor of GGML's copies columns of it without changing a bit. It is
// tried once.
func KVTierCopiesColumns(tensor unsafe.Pointer) bool {
	kvtierColumnsMu.Lock()
	defer kvtierColumnsMu.Unlock()
	return bool(C.kvtier_copies_columns(tensor))
}

// KVTierGetColumns is the method of rows.Columns. It panics if the device can't; GGML's own copies end the process then.
func KVTierGetColumns(tensor unsafe.Pointer, offset, stride, columns int, dst []byte) {
	if len(dst) == 0 {
		return
	}
	kvtierColumnsMu.Lock()
	defer kvtierColumnsMu.Unlock()
	which := kvtierColumns(tensor, offset, stride, columns, dst)
	if !bool(C.kvt_get_columns((*C.struct_ggml_tensor)(tensor), which, (*C.char)(unsafe.Pointer(&dst[0])))) {
		panic("KV tiering: the device could not copy rows out of its memory")
	}
}

// KVTierSetColumns is the method of rows.Columns. It panics as KVTierGetColumns does.
func KVTierSetColumns(tensor unsafe.Pointer, offset, stride, columns int, src []byte) {
	if len(src) == 0 {
		return
	}
	kvtierColumnsMu.Lock()
	defer kvtierColumnsMu.Unlock()
	which := kvtierColumns(tensor, offset, stride, columns, src)
	if !bool(C.kvt_set_columns((*C.struct_ggml_tensor)(tensor), which, (*C.char)(unsafe.Pointer(&src[0])))) {
		panic("KV tiering: the device could not copy rows into its memory")
	}
}

func kvtierColumns(tensor unsafe.Pointer, offset, stride, columns int, memory []byte) C.struct_kvt_columns {
	size := int(C.ggml_type_size((*C.struct_ggml_tensor)(tensor)._type))
	return C.struct_kvt_columns{
		first_byte: C.size_t(offset), column_bytes: C.size_t(stride), elements: C.size_t(columns), cells: C.size_t(len(memory) / columns / size),
	}
}

// The same as methods. They implement rows.Columns and kvcache.tierTensor.

func (t *Tensor) KVTierCopiesColumns() bool { return KVTierCopiesColumns(unsafe.Pointer(t.t)) }

func (t *Tensor) KVTierGetColumns(offset, stride, columns int, dst []byte) {
	KVTierGetColumns(unsafe.Pointer(t.t), offset, stride, columns, dst)
}

func (t *Tensor) KVTierSetColumns(offset, stride, columns int, src []byte) {
	KVTierSetColumns(unsafe.Pointer(t.t), offset, stride, columns, src)
}
