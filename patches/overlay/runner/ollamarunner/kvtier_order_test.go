package ollamarunner

import (
	"testing"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/ml"
)

type tierFakeOrdered struct {
	layers []kvcache.KVTierLayer
	dtype  string
	device bool
	states kvcache.KVTierStates
}

func (f tierFakeOrdered) Layers() []kvcache.KVTierLayer               { return f.layers }
func (f tierFakeOrdered) Type() string                                { return f.dtype }
func (f tierFakeOrdered) OnHost() bool                                { return !f.device }
func (f tierFakeOrdered) States() (s kvcache.KVTierStates, child int) { return f.states, 1 }

func TestTierBitsDependOnTheRowAloneOnlyWhereEverythingSeesToIt(t *testing.T) {
	of := func(k, v int) []kvcache.KVTierLayer {
		return []kvcache.KVTierLayer{{KHeadDim: 128, VHeadDim: 128}, {KHeadDim: k, VHeadDim: v}}
	}
	type on = ml.GPULayersList
	for name, c := range map[string]struct {
		cache    tierFakeOrdered
		assigned on
		iq4nl    bool
		want     bool
	}{
		"plain":                 {cache: tierFakeOrdered{layers: of(128, 128), dtype: "f16"}, want: true},
		"MLA":                   {cache: tierFakeOrdered{layers: of(576, 512), dtype: "f16"}, want: true},
		"80 in f16":             {cache: tierFakeOrdered{layers: of(80, 80), dtype: "f16"}, want: true},
		"80 in q8_0":            {cache: tierFakeOrdered{layers: of(80, 80), dtype: "q8_0"}},
		"K that is not served":  {cache: tierFakeOrdered{layers: of(72, 128), dtype: "f16"}},
		"V that is not served":  {cache: tierFakeOrdered{layers: of(128, 72), dtype: "f16"}},
		"heads that are large":  {cache: tierFakeOrdered{layers: of(2048, 128), dtype: "f16"}},
		"rows on a device":      {cache: tierFakeOrdered{layers: of(128, 128), dtype: "f16", device: true}},
		"a layer on a device":   {cache: tierFakeOrdered{layers: of(128, 128), dtype: "f16"}, assigned: on{tierLayersOn("GPU-a", 0)}},
		"weights in iq4_nl":     {cache: tierFakeOrdered{layers: of(128, 128), dtype: "f16"}, iq4nl: true},
		"layers with recurrent": {cache: tierFakeOrdered{layers: of(128, 128), dtype: "f16", states: newTierFakeStates()}},
	} {
		if got := tierOrdered(tierFakeDevices{iq4nl: c.iq4nl}, c.cache, c.assigned); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
