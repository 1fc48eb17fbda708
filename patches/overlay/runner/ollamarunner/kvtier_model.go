package ollamarunner

import (
	"fmt"
	"path/filepath"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tier"
	"github.com/ollama/ollama/ml"
	"github.com/ollama/ollama/ml/nn/pooling"
	"github.com/ollama/ollama/model"
	"github.com/ollama/ollama/version"
)

// tierModel is what the loaded model says to the tiering, with its rows; or why it can't be tiered. t is asked what
// its settings add to the namespace.
func tierModel(s *Server, t *tier.Tier) (rows tier.Rows, m tier.Model, reason string) {
	m = tier.Model{
		Path: s.modelPath, Engine: "ollama-go/" + version.Version, Attention: func() string { return tierAttention(s) },
	}
	if s.cache == nil || s.cache.cache == nil {
		return nil, m, "the model has no K/V cache"
	}
	if pooling.Type(s.model.Backend().Config().Uint("pooling_type")) != pooling.TypeNone {
		return nil, m, "embedding model"
	}
	cache, ok := s.cache.cache.(*kvcache.Causal)
	if _, wrapper := s.cache.cache.(*kvcache.WrapperCache); wrapper {
		return nil, m, "several caches in one (sliding window attention or an encoder), not supported yet"
	} else if !ok {
		return nil, m, fmt.Sprintf("cache of type %T, not supported yet", s.cache.cache)
	}
	if reason := cache.KVTierUnsupported(); reason != "" {
		return nil, m, reason + ", not supported yet"
	}
	if t.Rounds() && cache.KVTierType() != "f16" {
		return nil, m, kvtier.RoundedTwice(cache.KVTierType())
	}
	if _, ok := s.model.(model.MultimodalProcessor); ok {
		return nil, m, "model with image input, not supported yet"
	}
	backend, ok := s.model.Backend().(tierBackend)
	if !ok {
		return nil, m, "backend without synchronisation"
	}
	build, err := kvtier.Build(ml.LibOllamaPath)
	if err != nil {
		return nil, m, "what this program was built from can't be told: " + err.Error()
	}
	m.Engine = kvtier.EngineName("ollama-go", version.Version, build)
	m.Slots, m.Layers, m.DType, m.OnHost = len(s.cache.slots), tierLayers(cache), cache.KVTierType(), cache.KVTierOnHost()
	m.Description = kvtier.Description{
		Model:          filepath.Base(s.modelPath),
		Engine:         m.Engine,
		CacheDType:     m.DType,
		Layers:         m.Layers,
		FlashAttention: s.lastLoad.FlashAttention == ml.FlashAttentionEnabled,
		Extra: tierComputing(backend, cache.KVTierPlacement(), m.Layers, s.lastLoad.GPULayers) +
			kvtier.AttentionExtra(tierAttention(s), s.batchSize) + t.NamespaceExtra(),
	}.Proto()
	return cache.KVTierRows(), m, ""
}

// tierLayers is the geometry of a cache in the words of blocks.
func tierLayers(cache *kvcache.Causal) (layers []kvtier.Layer) {
	for _, l := range cache.KVTierLayers() {
		layers = append(layers, kvtier.Layer{
			Layer: l.Layer, Kind: "full", KVHeads: l.KVHeads, KHeadDim: l.KHeadDim, VHeadDim: l.VHeadDim,
			KRowBytes: l.KRowBytes, VRowBytes: l.VRowBytes,
		})
	}
	return layers
}

// tierAttention says how attention is computed on the CPU; "" for a model that has no layer there. It starts with
// kvtier.AttentionExact where our kernels do it.
func tierAttention(s *Server) string {
	if s.model == nil || s.lastLoad.GPULayers.Sum() >= int(s.model.Backend().Config().Uint("block_count")) {
		return ""
	}
	backend, ok := s.model.Backend().(interface{ KVTierAttention() string })
	switch {
	case !ok:
		return ""
	case kvtier.CPUAttentionExact() && s.lastLoad.FlashAttention != ml.FlashAttentionEnabled:
		return "stock (flash attention is off)"
	}
	return backend.KVTierAttention()
}
