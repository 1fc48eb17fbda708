package ggml

// #include "kvtier_columns.h"
// static bool kvtier_copies_columns(void * tensor) { return kvt_device_of_columns((struct ggml_tensor *) tensor) != NULL; }
import "C"

import (
	"sync"
	"unsafe"

	"github.com/ollama/ollama/kvtier/rows"
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
func KVTierGetColumns(tensor unsafe.Pointer, runs []rows.Run, stride, columns int, dst []byte) {
	if len(runs) == 0 {
		return
	}
	kvtierColumnsMu.Lock()
	defer kvtierColumnsMu.Unlock()
	which := kvtierRuns(runs)
	if !bool(C.kvt_get_columns((*C.struct_ggml_tensor)(tensor), kvtierColumns(stride, columns), &which[0], C.size_t(len(which)),
		(*C.char)(unsafe.Pointer(&dst[0])))) {
		panic("KV tiering: the device could not copy rows out of its memory")
	}
}

// KVTierSetColumns is the method of rows.Columns. It panics as KVTierGetColumns does.
func KVTierSetColumns(tensor unsafe.Pointer, runs []rows.Run, stride, columns int, src []byte) {
	if len(runs) == 0 {
		return
	}
	kvtierColumnsMu.Lock()
	defer kvtierColumnsMu.Unlock()
	which := kvtierRuns(runs)
	if !bool(C.kvt_set_columns((*C.struct_ggml_tensor)(tensor), kvtierColumns(stride, columns), &which[0], C.size_t(len(which)),
		(*C.char)(unsafe.Pointer(&src[0])))) {
		panic("KV tiering: the device could not copy rows into its memory")
	}
}

func kvtierColumns(stride, columns int) C.struct_kvt_columns {
	return C.struct_kvt_columns{column_bytes: C.size_t(stride), elements: C.size_t(columns)}
}

func kvtierRuns(runs []rows.Run) []C.struct_kvt_run {
	which := make([]C.struct_kvt_run, len(runs))
	for i, run := range runs {
		which[i] = C.struct_kvt_run{first_byte: C.size_t(run.Offset), cells: C.size_t(run.Cells)}
	}
	return which
}

// The same as methods. They implement rows.Columns and kvcache.tierTensor.

func (t *Tensor) KVTierCopiesColumns() bool { return KVTierCopiesColumns(unsafe.Pointer(t.t)) }

func (t *Tensor) KVTierGetColumns(runs []rows.Run, stride, columns int, dst []byte) {
	KVTierGetColumns(unsafe.Pointer(t.t), runs, stride, columns, dst)
}

func (t *Tensor) KVTierSetColumns(runs []rows.Run, stride, columns int, src []byte) {
	KVTierSetColumns(unsafe.Pointer(t.t), runs, stride, columns, src)
}
