package ggml

// #ifndef _GNU_SOURCE
// #define _GNU_SOURCE // dl_iterate_phdr
// #endif
// #include "ggml.h"
// #include "ggml-backend.h"
// // The CPU backend may be a library that was loaded at run time: it is asked by name.
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
// // A part of a library in memory: all of them, by the numbers of the library and of its part.
// struct kvtier_part { int library, part; const char * path; int notes, code; const void * at; size_t bytes; };
// #ifdef __linux__
// #include <link.h>
// static int kvtier_look(struct dl_phdr_info * library, size_t size, void * to) {
//     struct kvtier_part * wanted = to;
//     if (wanted->library-- > 0) {
//         return 0;
//     }
//     wanted->path = library->dlpi_name != NULL ? library->dlpi_name : "";
//     if (wanted->part < library->dlpi_phnum) {
//         const ElfW(Phdr) * part = &library->dlpi_phdr[wanted->part];
//         wanted->notes = part->p_type == PT_NOTE;
//         wanted->code = part->p_type == PT_LOAD && (part->p_flags & PF_R) && !(part->p_flags & PF_W);
//         wanted->at = (const void *) (library->dlpi_addr + part->p_vaddr);
//         wanted->bytes = part->p_filesz;
//         return 2;
//     }
//     return 1;
// }
// // 2: there is such a part, 1: the library has no more, 0: there are no more libraries.
// static int kvtier_find(struct kvtier_part * wanted) { return dl_iterate_phdr(kvtier_look, wanted); }
// #else
// static int kvtier_find(struct kvtier_part * wanted) { return 0; }
// #endif
// // GGML's own buffers of the CPU name no device.
// static bool kvtier_on_device(ggml_backend_buffer_t buffer) {
//     ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
//     if (device == NULL) {
//         return false;
//     }
//     enum ggml_backend_dev_type type = ggml_backend_dev_type(device);
//     return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
// }
// // Memory of the host that the first GPU copies from by itself; NULL where there is none.
// static void * kvtier_pinned(size_t bytes) {
//     for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
//         ggml_backend_dev_t device = ggml_backend_dev_get(i);
//         if (ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_GPU) {
//             continue;
//         }
//         ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device);
//         ggml_backend_buffer_t buffer = type != NULL ? ggml_backend_buft_alloc_buffer(type, bytes) : NULL;
//         return buffer != NULL ? ggml_backend_buffer_get_base(buffer) : NULL;
//     }
//     return NULL;
// }
import "C"

import (
	"strings"
	"unsafe"

	"github.com/ollama/ollama/kvtier"
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

// writtenByHost reports whether the CPU writes the tensor: it can access the memory, and no device computes what lies there.
func (t *Tensor) writtenByHost() bool { return t.KVTierHost() != nil && !t.KVTierOnDevice() }

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

// KVTierPinned makes memory that the first GPU copies from at its full speed, without a copy in between that its driver makes:
// nil where there is none. It stays as long as the process does.
func KVTierPinned(bytes int) []byte {
	at := C.kvtier_pinned(C.size_t(bytes))
	if at == nil {
		return nil
	}
	return unsafe.Slice((*byte)(at), bytes)
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

// KVTierLibraries says which libraries are in memory.
func KVTierLibraries() string {
	var objects []kvtier.LoadedObject
	for number := 0; ; number++ {
		var object kvtier.LoadedObject
		for part := 0; ; part++ {
			found := C.struct_kvtier_part{library: C.int(number), part: C.int(part)}
			more := C.kvtier_find(&found)
			if more == 0 {
				return kvtier.Libraries(objects)
			}
			object.Path = C.GoString(found.path)
			if more == 1 {
				break
			}
			switch bytes := unsafe.Slice((*byte)(found.at), int(found.bytes)); {
			case found.notes != 0:
				object.Notes = append(object.Notes, bytes)
			case found.code != 0:
				object.Code = append(object.Code, bytes)
			}
		}
		objects = append(objects, object)
	}
}

// The same as methods, for those who know the backend as an interface.

func (b *Backend) KVTierCPU() string { return KVTierCPU() }

func (b *Backend) KVTierLibc() string { return KVTierLibc() }

func (b *Backend) KVTierLibraries() string { return KVTierLibraries() }

func (b *Backend) KVTierPinned(bytes int) []byte { return KVTierPinned(bytes) }
