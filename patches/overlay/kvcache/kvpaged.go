package kvcache

import (
	"github.com/ollama/ollama/kvpaged"
	"github.com/ollama/ollama/ml"
)

// pagedLayer returns the context that the current layer's K/V are allocated in. Values that lie permuted are for attention
// without the fused operation, and that reads no pages.
func (c *Causal) pagedLayer(ctx ml.Context) ml.Context {
	if paged, ok := ctx.(interface{ KVPagedLayer(layer int) ml.Context }); ok && !c.config.PermutedV {
		return paged.KVPagedLayer(c.curLayer)
	}
	return ctx.Layer(c.curLayer)
}

// pagedMask returns the tensor of a batch's mask. Stock's has f32, and a device converts it to what attention reads: both lie
// there then, in three times the room. While K/V may be paged it is made as attention reads it.
func (c *Causal) pagedMask(ctx ml.Context, mask []float32, shape ...int) ml.Tensor {
	if !kvpaged.On() || c.config.MaskDType != ml.DTypeF16 {
		return ctx.FromFloats(mask, shape...)
	}
	return ctx.FromBytes(ml.DTypeF16, kvpaged.HalfMask(mask), shape...)
}
