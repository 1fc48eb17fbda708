package llm

import (
	"log/slog"
	"slices"

	"github.com/ollama/ollama/api"
	"github.com/ollama/ollama/format"
	"github.com/ollama/ollama/fs/ggml"
	"github.com/ollama/ollama/kvpaged"
	"github.com/ollama/ollama/ml"
)

// pagedFlashAttention decides on flash attention for the Ollama engine: K/V are paged inside of that operation, so that a
// model on a GPU gets it unless its user said no (userSet) or the model can't have it.
func pagedFlashAttention(on, userSet bool, gpus []ml.DeviceInfo, model *ggml.GGML) bool {
	if on || userSet || !kvpaged.On() || len(gpus) == 0 {
		return on
	}
	return model.SupportsFlashAttention()
}

// PagedModelOf is what `ollama ps` is told of a model's K/V in pinned memory.
func PagedModelOf(server LlamaServer) api.PagedModel {
	if s, ok := server.(*ollamaServer); ok && s.mem != nil {
		return api.PagedModel{SizePinned: int64(s.mem.CPU.PinnedSize())}
	}
	return api.PagedModel{}
}

// paging decides, while a model is loaded, whose K/V lie in pinned system memory: of no layer, while stock's layout has all
// layers on GPUs; else of as few as it takes.
type paging struct {
	server *ollamaServer
	gpus   []ml.DeviceInfo
	budget kvpaged.Budget
	on     bool
	fixed  bool              // by OLLAMA_PAGED_HOT_LAYERS
	stock  *ml.BackendMemory // what the runner needed before anything was paged
}

// startPaging begins with nothing paged, unless a number is fixed. While other models might be unloaded instead
// (requireFull) it stays so.
func (s *ollamaServer) startPaging(system ml.SystemInfo, gpus []ml.DeviceInfo, requireFull bool) *paging {
	s.loadRequest.PagedParams = ml.PagedParams{}
	p := &paging{server: s, gpus: gpus}
	layers := int(s.totalLayers)
	fewer := s.options.NumGPU >= 0 && s.options.NumGPU < layers // as the user wants it
	if !kvpaged.On() || len(gpus) == 0 || fewer {
		return p
	}
	if s.loadRequest.FlashAttention != ml.FlashAttentionEnabled {
		slog.Warn("paged attention: flash attention is off or not for this model: its K/V are not paged")
		return p
	}
	hot, fixed := kvpaged.HotLayers()
	p.on, p.fixed = fixed || !requireFull, fixed
	p.budget = kvpaged.HostBudget(system.TotalMemory, system.FreeMemory)
	if fixed {
		order := kvpaged.Order(slices.Repeat([]uint64{1}, layers-1)) // the last one is the output
		s.loadRequest.PagedLayers = slices.Sorted(slices.Values(order[:max(0, len(order)-hot)]))
	}
	return p
}

// layout looks at what the runner needs. If stock's layout does not have all layers on GPUs, but would if more K/V were
// paged, it returns that one, and the request says which; nil leaves the decision to stock.
func (p *paging) layout(memory *ml.BackendMemory, backoff float32) (ml.GPULayersList, error) {
	if !p.on {
		return nil, nil
	}
	if memory.CPU.Pinned == nil {
		slog.Warn("paged attention: no GPU of the runner has it; is libggml-cuda-tiering.so beside libggml-cuda.so?")
		p.on = false
		return nil, nil
	}
	if err := p.allowed(memory.CPU.PinnedSize()); err != nil || p.fixed || p.fits(memory, backoff) != nil {
		return nil, err
	}
	if len(p.server.loadRequest.PagedLayers) == 0 {
		p.stock = memory
	}

	sizes := make([]uint64, len(memory.CPU.Pinned))
	for _, gpu := range memory.GPUs {
		for i, size := range gpu.Cache {
			sizes[i] += size
		}
	}
	for _, layer := range p.server.loadRequest.PagedLayers {
		sizes[layer] = 0 // what is there still is no K/V: a state of a recurrent layer
	}
	order := kvpaged.Order(sizes)
	pinned := memory.CPU.PinnedSize()
	for i, layer := range order {
		pinned += sizes[layer]
		if layers := p.fits(without(memory, order[:i+1]), backoff); layers != nil {
			if err := p.allowed(pinned); err != nil {
				return nil, err
			}
			request := &p.server.loadRequest
			request.PagedLayers = slices.Concat(request.PagedLayers, order[:i+1])
			slices.Sort(request.PagedLayers)
			slog.Info("paged attention: K/V of some layers go to pinned memory", "layers", len(sizes)-1,
				"paged", len(request.PagedLayers), "size", format.HumanBytes2(pinned))
			return layers, nil
		}
	}
	if request := &p.server.loadRequest; len(request.PagedLayers) > 0 && !request.PagedInTurn {
		request.PagedInTurn = true
		slog.Info("paged attention: the GPUs have no room for copies of two layers: none is copied ahead of its turn")
		return request.GPULayers, nil
	}
	return p.giveUp(backoff), nil
}

// giveUp goes back to stock's way, from where it was left.
func (p *paging) giveUp(backoff float32) ml.GPULayersList {
	p.on = false
	slog.Warn("paged attention: the model does not fit its GPUs even without any K/V: the layers are divided as stock does")
	if len(p.server.loadRequest.PagedLayers) == 0 {
		return nil
	}
	p.server.loadRequest.PagedParams = ml.PagedParams{}
	layers, _ := p.server.buildLayout(p.gpus, p.stock, false, backoff)
	return layers
}

func (p *paging) allowed(pinned uint64) error {
	if pinned > p.budget.Bytes {
		return p.budget.Refusal(pinned, p.server.loadRequest.KvSize)
	}
	return nil
}

// fits returns stock's layout if all layers are on GPUs in it, whatever number of them the user forces.
func (p *paging) fits(memory *ml.BackendMemory, backoff float32) ml.GPULayersList {
	forced := p.server.options.NumGPU
	p.server.options.NumGPU = -1
	defer func() { p.server.options.NumGPU = forced }()
	layers, sizes := p.server.buildLayout(p.gpus, memory, false, backoff)
	if layers.Sum() < len(sizes) {
		return nil
	}
	return layers
}

// without returns the memory as it would be if these layers had no K/V on a device.
func without(memory *ml.BackendMemory, layers []int) *ml.BackendMemory {
	less := *memory
	less.GPUs = slices.Clone(memory.GPUs)
	for i := range less.GPUs {
		less.GPUs[i].Cache = slices.Clone(less.GPUs[i].Cache)
		for _, layer := range layers {
			less.GPUs[i].Cache[layer] = 0
		}
	}
	return &less
}
