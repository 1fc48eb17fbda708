package ollamarunner

import (
	"slices"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/ml"
)

// tierOrderedCache is what tierOrdered asks of a kvcache.KVTierCache.
type tierOrderedCache interface {
	Layers() []kvcache.KVTierLayer
	Type() string
	OnHost() bool
	States() (states kvcache.KVTierStates, child int)
}

// tierOrdered reports whether a row of the model has the same bits however its prompt is cut, whoever else is in its batches, and
// in whatever cells it lies. That takes exact attention in every layer, which sums in the order of positions, all layers on the
// CPU, products that are summed alike for one column and for many, and no recurrent layer.
func tierOrdered(backend tierBackend, cache tierOrderedCache, assigned ml.GPULayersList) bool {
	states, _ := cache.States()
	return states == nil && assigned.Sum() == 0 && cache.OnHost() && backend.ExactAttnAnyCut() &&
		!slices.ContainsFunc(cache.Layers(), func(l kvcache.KVTierLayer) bool { return !tierServed(l, cache.Type()) })
}

// tierServed reports whether the exact kernels compute such a layer, as unsupported() in csrc/include/paged_attn/cpu/run.h has it:
// what they don't serve stock's attention computes.
func tierServed(l kvcache.KVTierLayer, dtype string) bool {
	step := 16
	if dtype != "f16" {
		step = 32 // values that share a scale
	}
	return l.KHeadDim%step == 0 && l.VHeadDim%step == 0 && max(l.KHeadDim, l.VHeadDim) <= 1024
}
