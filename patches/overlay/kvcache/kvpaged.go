package kvcache

import "github.com/ollama/ollama/ml"

// pagedLayer returns the context that the current layer's K/V are allocated in. Values that lie permuted are for attention
// without the fused operation, and that reads no pages.
func (c *Causal) pagedLayer(ctx ml.Context) ml.Context {
	if paged, ok := ctx.(interface{ KVPagedLayer(layer int) ml.Context }); ok && !c.config.PermutedV {
		return paged.KVPagedLayer(c.curLayer)
	}
	return ctx.Layer(c.curLayer)
}
