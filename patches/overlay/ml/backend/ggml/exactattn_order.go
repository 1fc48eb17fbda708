package ggml

// #include "ggml.h"
// #include "ggml-backend.h"
// #include "ggml/src/ggml-cpu/exactattn.h"
// static uint64_t exactattn_refused_of(ggml_backend_dev_t device) {
//     uint64_t (*refused)(void) =
//         (uint64_t (*)(void)) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "exactattn_refused");
//     return refused ? refused() : 0;
// }
import "C"

import (
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/ollama/ollama/exactattn"
	"github.com/ollama/ollama/ml"
)

// exactAttnMask is what a mask of attention says beside what it hides: the position of each cell, -1 of one that holds nothing. The
// exact attention sums in their order, so that neither the cells that rows lie in nor other rows of a batch change a bit.
type exactAttnMask struct {
	positions *Tensor
}

// ExactAttnSetPositions notes the positions of a mask's cells, where the exact attention may ask for them.
func (t *Tensor) ExactAttnSetPositions(ctx ml.Context, positions []int32) {
	if strings.HasPrefix(t.b.ExactAttnState(), exactattn.Exact) {
		t.positions = ctx.Input().FromInts(positions, len(positions)).(*Tensor)
	}
}

// exactAttnSetOrder gives an attention the positions of its mask, if the CPU writes its K. What a device writes may lie in memory
// of the host, too. Where GGML has a device compute an attention of such a K nevertheless, nobody reads them there.
func exactAttnSetOrder(kqv *C.struct_ggml_tensor, key, mask ml.Tensor) {
	m, ok := mask.(*Tensor)
	if !ok || m.positions == nil {
		return
	}
	k := key.(*Tensor).t
	for k.view_src != nil {
		k = k.view_src
	}
	if (&Tensor{t: k}).writtenByHost() {
		kqv.src[C.EXACTATTN_POSITIONS] = m.positions.t
	}
}

// ExactAttnReads returns what looks at the graph of a batch that is built: which operation reads one of the tensors of a cache, K or
// V of a layer, other than as an attention that has the positions of its cells; "" if none does. Then no bit of the batch's rows
// depends on the cells that earlier ones lie in.
func (b *Backend) ExactAttnReads(cache []ml.Tensor) func(batch ml.Context) string {
	of := make(map[*C.struct_ggml_tensor]bool, len(cache))
	for _, t := range cache {
		of[t.(*Tensor).t] = true
	}
	return func(batch ml.Context) string {
		graph := batch.(*Context).graph
		if graph == nil {
			return ""
		}
		for _, node := range unsafe.Slice(C.ggml_graph_nodes(graph), int(C.ggml_graph_n_nodes(graph))) {
			if exactAttnReads(node, of) {
				return C.GoString(C.ggml_op_name(node.op))
			}
		}
		return ""
	}
}

// exactAttnReads is ExactAttnReads for one operation. A view reads nothing, nor does writing rows read where it writes to.
func exactAttnReads(node *C.struct_ggml_tensor, of map[*C.struct_ggml_tensor]bool) bool {
	switch node.op {
	case C.GGML_OP_NONE, C.GGML_OP_VIEW, C.GGML_OP_RESHAPE, C.GGML_OP_PERMUTE, C.GGML_OP_TRANSPOSE:
		return false
	case C.GGML_OP_FLASH_ATTN_EXT:
		if node.src[C.EXACTATTN_POSITIONS] != nil {
			return false
		}
	}
	for i, src := range node.src {
		for src != nil && src.view_src != nil {
			src = src.view_src
		}
		// What is computed is no cache, and most sources are: they need no look into the map, for every batch of one token comes here.
		if src != nil && src.op == C.GGML_OP_NONE && of[src] && !(node.op == C.GGML_OP_SET_ROWS && i == 2) {
			return true
		}
	}
	return false
}

// ExactAttnRefused is how many attentions that had positions were computed by stock's kernel, which knows none.
func (b *Backend) ExactAttnRefused() int {
	device := C.ggml_backend_dev_by_type(C.GGML_BACKEND_DEVICE_TYPE_CPU)
	if device == nil {
		return 0
	}
	return int(C.exactattn_refused_of(device))
}

// exactAttnAnyCut are the types of weights whose products have the same bits for one column as for several, with the exact
// attention, in GGML's code for AVX2 and more: its sgemm has one chain of sums for each element, and so has what computes one
// column, or sgemm does not have the type. Not iq4_nl, for which they differ.
var exactAttnAnyCut = []uint32{
	C.GGML_TYPE_F32, C.GGML_TYPE_F16, C.GGML_TYPE_BF16, C.GGML_TYPE_Q4_0, C.GGML_TYPE_Q4_1, C.GGML_TYPE_Q5_0, C.GGML_TYPE_Q5_1,
	C.GGML_TYPE_Q8_0, C.GGML_TYPE_Q2_K, C.GGML_TYPE_Q3_K, C.GGML_TYPE_Q4_K, C.GGML_TYPE_Q5_K, C.GGML_TYPE_Q6_K, C.GGML_TYPE_MXFP4,
}

// ExactAttnAnyCut reports whether the products of the model's weights have the same bits for one column as for several, with the
// exact attention: where that is known of every tensor's type, and of the processor's code.
func (b *Backend) ExactAttnAnyCut() bool {
	if state := b.ExactAttnState(); runtime.GOOS != "linux" || !strings.Contains(state, "(avx2)") && !strings.Contains(state, "(avx512)") {
		return false
	}
	for _, t := range b.tensors {
		if !exactAttnSameForAnyCut(uint32(t._type), int(t.ne[1]), int(t.ne[2])) {
			return false
		}
	}
	return true
}

// exactAttnSameForAnyCut is ExactAttnAnyCut for a tensor of that type, number of rows and number of matrices. f32 in several matrices (latent
// attention) meets activations that lie in one piece for one column only, which sgemm refuses.
func exactAttnSameForAnyCut(of uint32, rows, matrices int) bool {
	return rows <= 1 || slices.Contains(exactAttnAnyCut, of) && (of != C.GGML_TYPE_F32 || matrices <= 1)
}
