package ggml

// #include <stdbool.h>
// #include <stdint.h>
// #include <string.h>
// #include "ggml.h"
// #include "ggml-backend.h"
// // As libggml-cuda-tiering.so names its buffer types (csrc/shim/pinned.cpp).
// static bool kvpaged_lies_paged(const struct ggml_tensor * t) {
//     if (t->buffer == NULL) {
//         return false;
//     }
//     const char * name = ggml_backend_buft_name(ggml_backend_buffer_get_type(t->buffer));
//     const size_t length = strlen(name), end = strlen("_Paged");
//     return length > end && strcmp(name + length - end, "_Paged") == 0;
// }
// // Counts a write to paged K or V in the parameters of the tensor itself, which is the result of no operation; 0: it is not
// // paged.
// static uint32_t kvpaged_count(struct ggml_tensor * t) {
//     struct ggml_tensor * root = t->view_src != NULL ? t->view_src : t;
//     if (!kvpaged_lies_paged(root)) {
//         return 0;
//     }
//     return __atomic_add_fetch((uint32_t *) &root->op_params[0], 1, __ATOMIC_RELAXED);
// }
// // Counts, and says in the parameters of a SET_ROWS, which has none, what the shim reads there (struct Tag of
// // csrc/shim/mirror.h): the count, and the lowest and highest of the cells that it writes.
// static void kvpaged_tag(struct ggml_tensor * node, bool indices_are_there) {
//     const uint32_t number = kvpaged_count(node);
//     const struct ggml_tensor * indices = node->src[1];
//     if (number == 0 || !indices_are_there || indices->op != GGML_OP_NONE || indices->view_src != NULL ||
//         indices->type != GGML_TYPE_I32 || indices->data == NULL || indices->buffer == NULL ||
//         !ggml_backend_buffer_is_host(indices->buffer) || ggml_nelements(indices) == 0) {
//         return;
//     }
//     const int32_t * cells = (const int32_t *) indices->data;
//     int32_t tag[4] = {0x6d70766b, (int32_t) number, cells[0], cells[0]};
//     for (int64_t i = 1; i < ggml_nelements(indices); i++) {
//         if (cells[i] < tag[2]) tag[2] = cells[i];
//         if (cells[i] > tag[3]) tag[3] = cells[i];
//     }
//     memcpy(node->op_params, tag, sizeof tag);
// }
import "C"

import "github.com/ollama/ollama/kvpaged"

// kvpagedTag counts a SET_ROWS that may write paged K/V, and says which cells it writes. The shim keeps the first cells of
// paged K/V on the device, too, and has to know of every write to them.
func (b *Backend) kvpagedTag(node *C.struct_ggml_tensor) *C.struct_ggml_tensor {
	if kvpaged.On() {
		C.kvpaged_tag(node, C.bool(b.allocMemory))
	}
	return node
}

// kvpagedCount counts another operation that may write paged K/V: a shift of the context.
func kvpagedCount(node *C.struct_ggml_tensor) *C.struct_ggml_tensor {
	if kvpaged.On() {
		C.kvpaged_count(node)
	}
	return node
}

// KVTierWritten counts what the host has written: restored rows. Implements rows.Written.
func (t *Tensor) KVTierWritten() { kvpagedCount(t.t) }
