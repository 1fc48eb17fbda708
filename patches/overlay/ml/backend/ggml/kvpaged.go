package ggml

// #include <stdbool.h>
// #include <stdlib.h>
// #include "ggml.h"
// #include "ggml-backend.h"
// // Only libggml-cuda-tiering.so (csrc/shim) knows the name.
// static ggml_backend_buffer_type_t kvpaged_buffer_type(ggml_backend_dev_t device, bool no_alloc, bool ahead) {
//     ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
//     typedef ggml_backend_buffer_type_t (*type_t)(ggml_backend_dev_t, bool, bool);
//     type_t type = (type_t) ggml_backend_reg_get_proc_address(reg, "kvpaged_buffer_type");
//     return type ? type(device, no_alloc, ahead) : NULL;
// }
// static void kvpaged_mirror_bytes(ggml_backend_dev_t device, size_t bytes) {
//     ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
//     typedef void (*set_t)(ggml_backend_dev_t, size_t);
//     set_t set = (set_t) ggml_backend_reg_get_proc_address(reg, "kvpaged_mirror_bytes");
//     if (set) set(device, bytes);
// }
// static size_t kvpaged_mirrored_bytes(ggml_backend_dev_t device) {
//     ggml_backend_reg_t reg = device ? ggml_backend_dev_backend_reg(device) : NULL;
//     typedef size_t (*get_t)(ggml_backend_dev_t);
//     get_t get = reg ? (get_t) ggml_backend_reg_get_proc_address(reg, "kvpaged_mirrored_bytes") : NULL;
//     return get ? get(device) : 0;
// }
// static const char * kvpaged_engine(ggml_backend_dev_t device) {
//     ggml_backend_reg_t reg = device ? ggml_backend_dev_backend_reg(device) : NULL;
//     typedef const char * (*engine_t)(ggml_backend_dev_t);
//     engine_t engine = reg ? (engine_t) ggml_backend_reg_get_proc_address(reg, "kvpaged_engine") : NULL;
//     return engine ? engine(device) : "";
// }
import "C"

import (
	"slices"
	"strings"

	"github.com/ollama/ollama/kvpaged"
	"github.com/ollama/ollama/ml"
)

// kvpagedBackend is embedded in Backend.
type kvpagedBackend struct {
	paged ml.PagedParams
}

// kvpagedBufferType returns the type of a device's pinned buffers for K/V, nil if it has none. Unless alloc they are sizes
// only.
func kvpagedBufferType(d C.ggml_backend_dev_t, alloc bool, params ml.PagedParams) C.ggml_backend_buffer_type_t {
	if !kvpaged.On() || d == nil {
		return nil
	}
	return C.kvpaged_buffer_type(d, C.bool(!alloc), C.bool(!params.PagedInTurn))
}

// kvpagedAccount lets a device's pinned buffers be counted as memory of the CPU, and tells the device what room mirrors have.
func kvpagedAccount(d C.ggml_backend_dev_t, params ml.BackendParams, memory *ml.BackendMemory, counted map[C.ggml_backend_buffer_type_t]*ml.DeviceMemory) {
	bt := kvpagedBufferType(d, params.AllocMemory, params.PagedParams)
	if bt == nil {
		return
	}
	if memory.CPU.Pinned == nil {
		memory.CPU.Pinned = make([]uint64, len(memory.CPU.Cache))
	}
	counted[bt] = &ml.DeviceMemory{Cache: memory.CPU.Pinned}
	var props C.struct_ggml_backend_dev_props
	C.ggml_backend_dev_get_props(d, &props)
	C.kvpaged_mirror_bytes(d, C.size_t(params.PagedMirrors[C.GoString(props.id)]))
}

// KVPagedTell notes in what BackendMemory returns, and has returned, what mirrors have taken of each GPU.
func (b *Backend) KVPagedTell() {
	for _, layer := range b.layers {
		if layer.d == nil {
			continue
		}
		name := C.GoString(C.ggml_backend_dev_name(layer.d))
		for i := range b.requiredMemory.GPUs {
			if b.requiredMemory.GPUs[i].Name == name {
				b.requiredMemory.GPUs[i].Mirrored = uint64(C.kvpaged_mirrored_bytes(layer.d))
			}
		}
	}
}

// KVPagedEngine names what computes attention on the GPUs of the model's layers: the kernels of libggml-cuda-tiering.so, with
// all that their results' bits depend on; "" where GGML's own libraries do.
func (b *Backend) KVPagedEngine() string {
	var names []string
	for _, layer := range b.layers {
		if name := C.GoString(C.kvpaged_engine(layer.d)); name != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ",")
}

// KVPagedLayer is Layer for what a cache allocates: in pinned memory, if that is where the layer's K/V shall lie.
func (c *Context) KVPagedLayer(i int) ml.Context {
	ctx := c.Layer(i)
	layer, ok := c.b.layers[i]
	if !ok || !slices.Contains(c.b.paged.PagedLayers, i) {
		return ctx
	}
	if bt := kvpagedBufferType(layer.d, c.b.allocMemory, c.b.paged); bt != nil {
		ctx.(*Context).buft = bt
	}
	return ctx
}
