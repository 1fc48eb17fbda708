package ggml

// #include "ggml.h"
// #include "ggml-backend.h"
// #include "ggml/src/ggml-cpu/kvtier-attn.h"
import "C"

import (
	"runtime"
	"strings"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/ml"
)

// kvtierMask is what a mask of attention says beside what it hides: the position of each cell, -1 of one that holds nothing. The
// exact attention sums in their order, so that neither the cells that rows lie in nor other rows of a batch change a bit.
type kvtierMask struct {
	positions *Tensor
}

// KVTierSetPositions notes the positions of a mask's cells, where the exact attention may ask for them.
func (t *Tensor) KVTierSetPositions(ctx ml.Context, positions []int32) {
	if strings.HasPrefix(t.b.KVTierAttention(), kvtier.AttentionExact) {
		t.positions = ctx.Input().FromInts(positions, len(positions)).(*Tensor)
	}
}

// kvtierSetOrder gives an attention the positions of its mask, if the CPU computes it: where its K lies.
func kvtierSetOrder(kqv *C.struct_ggml_tensor, key, mask ml.Tensor) {
	m, ok := mask.(*Tensor)
	if !ok || m.positions == nil {
		return
	}
	k := key.(*Tensor).t
	for k.view_src != nil {
		k = k.view_src
	}
	if k.buffer != nil && bool(C.ggml_backend_buffer_is_host(k.buffer)) {
		kqv.src[C.KVTIER_ATTN_POSITIONS] = m.positions.t
	}
}

// KVTierAnyCut reports whether the products of the model's weights have the same bits for one column as for several, with the
// exact attention: not where a tensor is bf16, nor on processors where nobody has compared them.
func (b *Backend) KVTierAnyCut() bool {
	if runtime.GOARCH != "amd64" {
		return false
	}
	for _, t := range b.tensors {
		if t._type == C.GGML_TYPE_BF16 && t.ne[1] > 1 {
			return false
		}
	}
	return true
}
