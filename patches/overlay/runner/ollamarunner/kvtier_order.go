package ollamarunner

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ollama/ollama/exactattn"
	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier/tiering"
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

// tierExpectsOrder is tierOrdered for a loaded model, if attention is exact at all.
func tierExpectsOrder(s *Server, backend tierBackend, cache tierOrderedCache) bool {
	return strings.HasPrefix(tierAttention(s), exactattn.Exact) && tierOrdered(backend, cache, s.lastLoad.GPULayers)
}

// tierOrder watches that it is so. What tierOrdered says of a model is a forecast, by its shape: whether every layer hands its
// mask on to an attention as the cache has made it, and whether the kernels take it, only batches tell. nil: nothing is expected.
type tierOrder struct {
	reads   func(batch ml.Context) string // which operation reads the cache in another order; "": none
	refused func() int                    // how many attentions stock's kernel has computed nevertheless
}

func newTierOrder(backend tierBackend, cache *kvcache.KVTierCache) *tierOrder {
	return &tierOrder{reads: backend.ExactAttnReads(cache.Tensors()), refused: backend.ExactAttnRefused}
}

// built looks at a batch whose graph has been built, before a row of it is computed.
func (o *tierOrder) built(t *tiering.Tiering, batch ml.Context) {
	if o == nil {
		return
	}
	if op := o.reads(batch); op != "" {
		t.Withdraw(fmt.Sprintf(tierNoOrder, op+" reads its rows"))
	}
}

// computed looks at a batch that has been computed, before anybody may read its rows.
func (o *tierOrder) computed(t *tiering.Tiering) {
	if o == nil {
		return
	}
	if o.refused() > 0 {
		t.Withdraw(fmt.Sprintf(tierNoOrder, "stock's attention computes a layer"))
	}
}

const tierNoOrder = "of exact attention, every sum in the order of positions was expected when the model was loaded, but %s"

// tierServed reports whether the exact kernels compute such a layer, as unsupported() in csrc/include/paged_attn/cpu/run.h has it:
// what they don't serve stock's attention computes.
func tierServed(l kvcache.KVTierLayer, dtype string) bool {
	step := 16
	if dtype != "f16" {
		step = 32 // values that share a scale
	}
	return l.KHeadDim%step == 0 && l.VHeadDim%step == 0 && max(l.KHeadDim, l.VHeadDim) <= 1024
}
