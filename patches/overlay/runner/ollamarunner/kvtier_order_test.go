package ollamarunner

import (
	"testing"

	"github.com/ollama/ollama/fs"
	"github.com/ollama/ollama/fs/ggml"
	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/ml"
	"github.com/ollama/ollama/model"
	"github.com/ollama/ollama/model/input"
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

// tierFakeModel is a model of which only its backend is asked, and what that says of attention.
type tierFakeModel struct {
	model.Model
	backend tierFakeExact
}

func (m tierFakeModel) Backend() ml.Backend { return m.backend }

type tierFakeExact struct {
	ml.Backend
	tierFakeDevices
	attention string
	cached    *int // tensors of the cache that are watched
}

func (tierFakeExact) BackendDevices() []ml.DeviceInfo { return nil }
func (f tierFakeExact) ExactAttnState() string        { return f.attention }

func (tierFakeExact) Config() fs.Config {
	return ggml.KV{"general.architecture": "x", "x.block_count": uint32(2)}
}

func (f tierFakeExact) ExactAttnReads(cache []ml.Tensor) func(ml.Context) string {
	*f.cached = len(cache)
	return func(ml.Context) string { return "" }
}

func TestTierWhatIsExpectedOfAModelIsWatched(t *testing.T) {
	cache := kvcache.NewWrapperCache(kvcache.NewSWACache(8, nil), kvcache.NewCausalCache(nil))
	cache.Init(tierFakeBackend{}, ml.DTypeF16, 1, 64, 8)
	if err := cache.StartForward(tierFakeContext{}, input.Batch{Positions: []int32{0}, Sequences: []int{0}}, true); err != nil {
		t.Fatal(err)
	}
	for layer := range 2 {
		cache.SetLayer(layer)
		cache.SetLayerType(layer)
		cache.Put(tierFakeContext{}, tierFakeNew(16, 2, 1), tierFakeNew(16, 2, 1))
	}
	tiered, reason := kvcache.KVTierCacheOf(cache)
	if reason != "" {
		t.Fatal(reason)
	}
	for attention, want := range map[string]int{"exact (avx2)": 4, "stock": 0} {
		cached := 0
		s := &Server{model: tierFakeModel{backend: tierFakeExact{attention: attention, cached: &cached}}}
		h := newTierHost(s)
		h.bind(s, tiered)
		if (h.order != nil) != (want > 0) || cached != want {
			t.Errorf("%s: %v, %d tensors", attention, h.order, cached)
		}
	}
}

func TestTierAModelThatIsNotWhatWasExpectedOfItRunsAsInStock(t *testing.T) {
	for name, c := range map[string]struct {
		op      string
		refused int
		built   bool // still tiered when the batch is built
		after   bool // … when it has been computed
	}{
		"as expected":                {built: true, after: true},
		"a layer without positions":  {op: "FLASH_ATTN_EXT"},
		"a layer of stock's kernels": {refused: 1, built: true},
	} {
		f := newTierFake(t, 1, t.TempDir()+"/none.sock")
		f.order = &tierOrder{
			reads: func(ml.Context) string { return c.op },
			refused: func() int {
				if len(f.Running()) != 1 {
					t.Errorf("%s: others may read the rows already", name)
				}
				return c.refused
			},
		}
		f.Lock()
		tierBuilt(nil, 7, input.Batch{}, nil, nil)
		built := tiering.Active() != nil
		f.batches.begin(7)
		f.Unlock()
		tierComputeEnd(7)
		if after := tiering.Active() != nil; built != c.built || after != c.after || len(f.Running()) != 0 {
			t.Errorf("%s: tiered when it was built %v, afterwards %v; running %v", name, built, after, f.Running())
		}
	}
}
