package llm

import (
	"slices"
	"strings"

	"github.com/ollama/ollama/fs/ggml"
	"github.com/ollama/ollama/kvpaged"
	"github.com/ollama/ollama/ml"
)

// pagedHeads are the sizes of heads that libggml-cuda has flash attention for in every accepted version (fattn.cu), K and V
// of one size. Of any other the CPU might compute all attention: gemma4's 512 values came with v0.20.4.
var pagedHeads = []uint32{40, 64, 72, 80, 96, 112, 128, 256}

// pagedFlashAttention decides on flash attention for the Ollama engine: K/V are paged inside of that operation, so that a
// model on a GPU that can page gets it unless its user said no (userSet) or the model can't have it. Whether the model has
// to be paged is not known yet.
func pagedFlashAttention(on, userSet bool, gpus []ml.DeviceInfo, model *ggml.GGML) bool {
	cuda := func(gpu ml.DeviceInfo) bool { return gpu.Library == "CUDA" } // no other library has a shim
	if on || userSet || !kvpaged.On() || !slices.ContainsFunc(gpus, cuda) {
		return on
	}
	return model.SupportsFlashAttention() && pagedHeadsServed(model.KV())
}

// pagedHeadsServed says whether K and V of all layers have heads of the same size, one of pagedHeads. Layers may differ: there
// are keys of their own for those with windows (attention.key_length_swa), or a value for each layer.
func pagedHeadsServed(kv ggml.KV) bool {
	const k, v = "attention.key_length", "attention.value_length"
	usual := map[string]uint32{"": uint32(kv.EmbeddingHeadCountMax())} // of a key that is missing, or of another type; else 0
	kinds := []string{""}
	for key := range kv {
		name := strings.TrimPrefix(key, kv.Architecture()+".")
		for _, side := range []string{k, v} {
			if kind, ok := strings.CutPrefix(name, side+"_"); ok {
				kinds = append(kinds, "_"+kind)
			}
		}
	}
	for _, kind := range kinds {
		sizes := kv.UintOrArrayValueAsArray(k+kind, usual[kind])
		other := func(size uint32) bool { return !slices.Contains(pagedHeads, size) }
		if slices.ContainsFunc(sizes, other) || !slices.Equal(sizes, kv.UintOrArrayValueAsArray(v+kind, usual[kind])) {
			return false
		}
	}
	return true
}
