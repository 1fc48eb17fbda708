package ollamarunner

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ollama/ollama/exactattn"
	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/ml"
	"github.com/ollama/ollama/ml/nn/pooling"
	"github.com/ollama/ollama/version"
)

// tierModel is what the loaded model says to the tiering, with its cache; or why it can't be tiered. t is asked what its
// settings add to the namespace.
func tierModel(s *Server, t *tiering.Tiering) (cache *kvcache.KVTierCache, m tiering.Model, reason string) {
	m = tiering.Model{
		Path: s.modelPath, Engine: "ollama-go/" + version.Version, Attention: func() string { return tierAttention(s) },
		Settings: tierSettings(s.lastLoad),
	}
	if s.cache == nil || s.cache.cache == nil {
		return nil, m, "the model has no K/V cache"
	}
	m.Memory = tierCacheMemory(s.model.Backend().BackendMemory(), s.lastLoad.PagedParams)
	if pooling.Type(s.model.Backend().Config().Uint("pooling_type")) != pooling.TypeNone {
		return nil, m, "embedding model"
	}
	cache, reason = kvcache.KVTierCacheOf(s.cache.cache)
	if reason != "" {
		return nil, m, reason
	}
	if t.Rounds() && cache.Type() != "f16" {
		return nil, m, kvtier.RoundedTwice(cache.Type())
	}
	backend, ok := s.model.Backend().(tierBackend)
	if !ok {
		return nil, m, "backend without synchronisation"
	}
	if m.Files, reason = kvtier.LoadedBlobs(s.modelPath); reason != "" {
		return nil, m, reason
	}
	build, err := kvtier.Build(ml.LibOllamaPath)
	if err != nil {
		return nil, m, "what this program was built from can't be told: " + err.Error()
	}
	m.Engine = kvtier.EngineName("ollama-go", version.Version, build)
	layers := tierLayers(cache.Layers())
	m.Slots, m.DType, m.OnHost, m.Pinned = len(s.cache.slots), cache.Type(), cache.OnHost(), backend.KVTierPinned
	attention := tierAttention(s)
	cut, exact := kvtier.Part(exactattn.Identity(attention, exactattn.Asked())), strings.HasPrefix(attention, exactattn.Exact)
	ordered := tierExpectsOrder(s, backend, cache)
	m.Layers, m.Windows = tierKept(cache), tierWindows(cache, ordered)
	m.ByRows = !ordered && !t.Rounds()
	// The bits of states follow from how the prompt is cut, and so do the cells that the rows of a window are given.
	if exact && !ordered || slices.ContainsFunc(m.Windows, func(w tiering.Window) bool { return w.FreeCells == nil }) {
		cut += kvtier.Part("batch", fmt.Sprint(s.batchSize))
	}
	m.Description = kvtier.Description{
		Model:          filepath.Base(s.modelPath),
		Engine:         m.Engine,
		CacheDType:     m.DType,
		Layers:         layers,
		FlashAttention: s.lastLoad.FlashAttention == ml.FlashAttentionEnabled,
		Extra: tierPlaced(backend, cache, s.lastLoad.GPULayers) +
			backend.KVTierLibraries() + kvtier.Threads(backend.KVTierCPU(), s.lastLoad.NumThreads) + cut + tierWindowsExtra(m.Windows) + tierStatesExtra(cache) +
			m.ByRowsExtra() + t.NamespaceExtra() + kvtier.ContentExtra,
	}.Proto()
	return cache, m, ""
}

// tierLayers is the geometry of a cache's layers in the words of blocks.
func tierLayers(of []kvcache.KVTierLayer) (layers []kvtier.Layer) {
	for _, l := range of {
		layers = append(layers, kvtier.Layer{
			Child: l.Child, Layer: l.Layer, Kind: l.Kind, Window: l.Window, KVHeads: l.KVHeads, KHeadDim: l.KHeadDim, VHeadDim: l.VHeadDim,
			KRowBytes: l.KRowBytes, VRowBytes: l.VRowBytes,
		})
	}
	return layers
}

// tierKept are the layers that keep every row.
func tierKept(cache *kvcache.KVTierCache) []kvtier.Layer {
	return tierLayers(slices.DeleteFunc(cache.Layers(), func(l kvcache.KVTierLayer) bool { return l.Drops }))
}

// tierWindows are the caches that do not. ordered: their rows may come back in any cells.
func tierWindows(cache *kvcache.KVTierCache, ordered bool) (windows []tiering.Window) {
	for _, w := range cache.Windows() {
		of := slices.DeleteFunc(cache.Layers(), func(l kvcache.KVTierLayer) bool { return l.Child != w.Child })
		window := tiering.Window{
			Child: w.Child, Size: w.Size, Cells: w.Cells, DType: cache.Type(), Layers: tierLayers(of), Rows: w.Rows,
		}
		if ordered {
			window.Size, window.FreeCells = w.Still, w.Rows.FreeCells
		}
		windows = append(windows, window)
	}
	if states, child := cache.States(); states != nil {
		windows = append(windows, tierStates(states, child))
	}
	return windows
}

// tierStates are the states of recurrent layers as a window.
func tierStates(states kvcache.KVTierStates, child int) tiering.Window {
	return tiering.Window{
		Child: child, Size: 1, Cells: states.Places(), DType: "f32", Layers: tierLayers(states.Layers(child)), Rows: states,
		Checkpoints: states.Checkpoints,
	}
}

// tierWindowsExtra is what K/V of such a model depends on beside its layers: which cell a row is given follows from how many
// rows are kept and how many cells there are, and in which order sums run follows from the cells, but where it does not.
func tierWindowsExtra(windows []tiering.Window) string {
	var said []string
	for _, w := range windows {
		switch {
		case w.FreeCells != nil:
			said = append(said, fmt.Sprintf("%d:%d", w.Child, w.Size))
		case w.Checkpoints == nil:
			said = append(said, fmt.Sprintf("%d:%d:%d", w.Child, w.Size, w.Cells))
		}
	}
	return kvtier.Part("windows", strings.Join(said, ","))
}

// tierPlaced says what computes the model, where the layers with rows are computed, and then where those with states are.
func tierPlaced(backend tierBackend, cache *kvcache.KVTierCache, assigned ml.GPULayersList) string {
	by, layers := cache.ComputedBy(), tierLayers(cache.Layers())
	if states, child := cache.States(); states != nil {
		by += states.ComputedBy()
		for _, l := range tierLayers(states.Layers(child)) {
			l.Layer /= 2 // a layer may have two states
			layers = append(layers, l)
		}
	}
	return tierComputing(backend, by, layers, assigned)
}

// tierStatesExtra is the child of the states of recurrent layers, and how many bytes each has.
func tierStatesExtra(cache *kvcache.KVTierCache) string {
	states, child := cache.States()
	if states == nil {
		return ""
	}
	said := []string{fmt.Sprint(child)}
	for _, l := range states.Layers(child) {
		said = append(said, fmt.Sprintf("%d:%d", l.Layer, l.KRowBytes+l.VRowBytes))
	}
	return kvtier.Part("states", strings.Join(said, ","))
}

// tierAttention says how attention is computed on the CPU; "" for a model that has no layer there. It starts with
// exactattn.Exact where our kernels do it.
func tierAttention(s *Server) string {
	if s.model == nil || s.lastLoad.GPULayers.Sum() >= int(s.model.Backend().Config().Uint("block_count")) {
		return ""
	}
	backend, ok := s.model.Backend().(interface{ ExactAttnState() string })
	switch {
	case !ok:
		return ""
	case exactattn.Asked() && s.lastLoad.FlashAttention != ml.FlashAttentionEnabled:
		return "stock (flash attention is off)"
	}
	return backend.ExactAttnState()
}
