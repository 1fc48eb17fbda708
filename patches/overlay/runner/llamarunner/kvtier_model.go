package llamarunner

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/ollama/ollama/exactattn"
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/kvtier/tierpb"
	"github.com/ollama/ollama/llama"
	"github.com/ollama/ollama/ml"
	"github.com/ollama/ollama/ml/backend/ggml"
	libraries "github.com/ollama/ollama/ml/backend/ggml/ggml/src"
	"github.com/ollama/ollama/version"
)

const tierEngine = "llama.cpp"

// tierModel is what the loaded model says to the tiering, with its rows; or why it can't be tiered.
func tierModel(s *Server, adapters []string, multiUserCache bool, t *tiering.Tiering) (rows *tierRows, m tiering.Model, reason string) {
	m = tiering.Model{Path: s.modelPath, Engine: tierEngine + "/" + version.Version, Attention: func() string { return "" }}
	m.Settings = &tierpb.RunnerSettings{ContextTokens: uint32(s.cache.numCtx), Slots: uint32(s.parallel), BatchTokens: uint32(s.batchSize)}
	if multiUserCache && s.parallel > 1 {
		return nil, m, "OLLAMA_MULTIUSER_CACHE with several slots, which the llama.cpp engine can't share prompts between"
	}
	blobs, reason := tierAdapters(adapters)
	if reason != "" {
		return nil, m, reason
	}
	// A projector (s.image) computes what is put in for an image, and nothing that a text's rows depend on.
	info, reason := s.lc.KVTierDescribe()
	if reason != "" {
		return nil, m, reason
	}
	m.Settings.Threads = uint32(info.Threads)
	layers := s.lc.KVTierLayers()
	dtype, reason := tierType(layers)
	if reason != "" {
		return nil, m, reason
	}
	if t.Rounds() && dtype != "f16" {
		return nil, m, kvtier.RoundedTwice(dtype)
	}
	if m.Files, reason = kvtier.LoadedBlobs(append([]string{s.modelPath}, adapters...)...); reason != "" {
		return nil, m, reason
	}
	build, err := kvtier.Build(ml.LibOllamaPath)
	if err != nil {
		return nil, m, "what this program was built from can't be told: " + err.Error()
	}
	info.ExactShift = info.ExactShift && dtype == "f16" // else it rounds anew
	// How a prompt is cut into batches decides which of GGML's products of matrices compute it, and no cell has a position here
	// that the exact attention could go by.
	cut := kvtier.Part(exactattn.Identity(tierAttention(layers, info), exactattn.Asked())) + kvtier.Part("batch", fmt.Sprint(s.batchSize))
	m.Engine = kvtier.EngineName(tierEngine, version.Version, build)
	m.Attention = func() string { return tierAttention(layers, info) }
	m.ByRows = !t.Rounds()
	m.Slots, m.Layers, m.DType, m.OnHost, m.Pinned = s.parallel, tierLayers(layers), dtype, tierOnHost(layers), ggml.KVTierPinned
	m.Description = kvtier.Description{
		Model:          filepath.Base(s.modelPath),
		Adapters:       blobs,
		Engine:         m.Engine,
		CacheDType:     dtype,
		Layers:         m.Layers,
		FlashAttention: info.FlashAttention,
		Extra: tierComputing(layers) + ggml.KVTierLibraries() + kvtier.Threads(ggml.KVTierCPU(), info.Threads) + tierSettings(layers, info) + cut +
			m.ByRowsExtra() + t.NamespaceExtra() + kvtier.ContentExtra,
	}.Proto()
	return newTierRows(s.lc, info, layers), m, ""
}

var tierBlob = regexp.MustCompile(`^sha256-[0-9a-f]{64}$`)

// tierAdapters names LoRA adapters, which hold for as long as the model is loaded, by the digests of their files: Ollama's
// blobs are called so.
func tierAdapters(paths []string) (blobs []string, reason string) {
	if len(paths) > 1 {
		// llama.cpp has them in a hash table by address.
		return nil, "several LoRA adapters, which the llama.cpp engine adds up in another order after every load"
	}
	for _, path := range paths {
		blob := filepath.Base(path)
		if !tierBlob.MatchString(blob) {
			return nil, "LoRA adapter that is no blob of Ollama's, named by its digest: " + blob
		}
		blobs = append(blobs, blob)
	}
	return blobs, ""
}

// tierType is the element type of all K and V.
func tierType(layers []llama.KVTierLayer) (dtype, reason string) {
	if len(layers) == 0 {
		return "", "layers that are not understood"
	}
	dtype = layers[0].K.KVTierType()
	if !slices.Contains([]string{"f16", "q8_0", "q4_0"}, dtype) {
		return "", fmt.Sprintf("K/V cache of type %s", dtype)
	}
	for _, l := range layers {
		switch {
		case l.K.KVTierType() != dtype || l.V.KVTierType() != dtype:
			return "", "K and V of several types"
		case l.VTransposed && dtype != "f16":
			return "", "V is transposed and quantised"
		case l.VTransposed && l.V.KVTierHost() == nil && !ggml.KVTierCopiesColumns(l.V.KVTierPointer()):
			return "", "V is transposed on a device that can't copy it exactly (OLLAMA_FLASH_ATTENTION=1 avoids that)"
		}
	}
	return dtype, ""
}

// tierOnHost reports whether the CPU can access all rows directly, as soon as computing has returned. What a device computes is
// not there by then, whatever memory it is in.
func tierOnHost(layers []llama.KVTierLayer) bool {
	return !slices.ContainsFunc(layers, func(l llama.KVTierLayer) bool {
		return !l.Device.CPU || l.K.KVTierHost() == nil || l.V.KVTierHost() == nil
	})
}

// tierAttention says how attention is computed on the CPU; "" for a model that has no layer there. It starts with
// exactattn.Exact where our kernels do it.
func tierAttention(layers []llama.KVTierLayer, info llama.KVTierContext) string {
	onCPU := slices.ContainsFunc(layers, func(l llama.KVTierLayer) bool { return l.Device.CPU })
	switch {
	case !onCPU:
		return ""
	case exactattn.Asked() && !info.FlashAttention:
		return "stock (flash attention is off)"
	}
	return ggml.ExactAttnState()
}

// tierSettings are what K/V depends on beside what computes it: RoPE, and where flash attention is off the layout of V.
func tierSettings(layers []llama.KVTierLayer, info llama.KVTierContext) string {
	v := ""
	if layers[0].VTransposed {
		v = "transposed"
	}
	return kvtier.Part("rope", info.RoPE) + kvtier.Part("v", v)
}

// tierComputing says what computes the model and which layer where, as for the Go engine.
func tierComputing(layers []llama.KVTierLayer) string {
	computing := kvtier.Computing{CPU: ggml.KVTierCPU(), Libc: ggml.KVTierLibc()}
	for _, l := range layers {
		if l.Device.CPU {
			computing.Places = append(computing.Places, kvtier.OnHost)
			continue
		}
		device := kvtier.Device{
			Library: l.Device.Library, Description: l.Device.Description,
			ComputeMajor: l.Device.ComputeMajor, ComputeMinor: l.Device.ComputeMinor,
			DriverMajor: l.Device.DriverMajor, DriverMinor: l.Device.DriverMinor, Libraries: libraries.LibPaths(),
		}
		computing.Devices = append(computing.Devices, device)
		computing.Places = append(computing.Places, device.Name())
	}
	return computing.Extra()
}
