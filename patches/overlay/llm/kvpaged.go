package llm

import (
	"log/slog"
	"slices"

	"github.com/ollama/ollama/api"
	"github.com/ollama/ollama/envconfig"
	"github.com/ollama/ollama/format"
	"github.com/ollama/ollama/kvpaged"
	"github.com/ollama/ollama/ml"
)

// PagedModelOf is what `ollama ps` is told of a model's K/V in pinned memory.
func PagedModelOf(server LlamaServer) api.PagedModel {
	if s, ok := server.(*ollamaServer); ok && s.mem != nil {
		return api.PagedModel{SizePinned: int64(s.mem.CPU.PinnedSize()), SizeMirrored: int64(s.mem.MirroredSize())}
	}
	return api.PagedModel{}
}

// paging decides, while a model is loaded, whose K/V lie in pinned system memory: of no layer, while stock's layout has all
// layers on GPUs; else of as few as it takes, or with mirrors of as many as may be.
type paging struct {
	server *ollamaServer
	gpus   []ml.DeviceInfo
	budget kvpaged.Budget
	on     bool
	fixed  bool              // by OLLAMA_PAGED_HOT_LAYERS
	stock  *ml.BackendMemory // what the runner needed before anything was paged

	mirrors  bool             // what is left on GPUs may become mirrors of paged K/V
	mirrored ml.GPULayersList // the layout at which mirrors were planned
	fewest   []int            // the layers that have to be paged, where more are for the sake of mirrors
}

const leastPaged = 4 // a quarter of all K/V has to be paged, or no more are than have to be

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
	p.mirrors = kvpaged.Mirrors()
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
	if err := p.allowed(memory.CPU.PinnedSize()); err != nil {
		return nil, err
	}
	fit := p.fits(memory, backoff)
	if p.mirrored != nil && fit == nil { // they were to take what nothing else needs
		request := &p.server.loadRequest
		request.PagedMirrors, p.mirrors = nil, false
		if p.fewest != nil { // without mirrors the others would only cost
			request.PagedLayers, p.fewest = p.fewest, nil
		}
		layers := p.mirrored
		p.mirrored = nil
		return layers, nil
	}
	if fit != nil {
		return p.mirror(memory), nil
	}
	if p.fixed {
		return nil, nil
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
			request.PagedLayers = slices.Sorted(slices.Values(slices.Concat(request.PagedLayers, order[:i+1])))
			if more := p.alsoPaged(order[i+1:], sizes, pinned); len(more) > 0 {
				p.fewest = request.PagedLayers
				request.PagedLayers = slices.Sorted(slices.Values(slices.Concat(p.fewest, more)))
				for _, layer := range more {
					pinned += sizes[layer]
				}
			}
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

// alsoPaged returns which other layers are paged once any has to be: with mirrors all that the budget still allows, from the
// first on. Their room on a GPU then holds the first cells of all paged layers, in the place of all cells of a few: of a
// conversation that num_ctx does not fill, less crosses the bus, and of a short one nothing. Where few layers have to be paged
// it is not worth the memory, and what each paged layer takes besides. sizes are K/V by layer.
func (p *paging) alsoPaged(order []int, sizes []uint64, pinned uint64) []int {
	all := pinned
	for _, layer := range order {
		all += sizes[layer]
	}
	if !p.mirrors || pinned < all/leastPaged {
		return nil
	}
	for i, layer := range order {
		if pinned += sizes[layer]; pinned > p.budget.Bytes {
			return order[:i]
		}
	}
	return order
}

// mirror lets what is left on the GPUs hold the first cells of the paged layers as well, so that they need not cross the bus.
// It returns the layout, to be asked for again with them; nil if nothing changes.
func (p *paging) mirror(memory *ml.BackendMemory) ml.GPULayersList {
	request := &p.server.loadRequest
	if !p.mirrors || p.mirrored != nil || len(request.PagedLayers) == 0 || request.GPULayers.Sum() < int(p.server.totalLayers) {
		return nil
	}
	request.PagedMirrors = make(map[string]uint64)
	for _, gpu := range p.gpus {
		for _, used := range memory.GPUs {
			need := used.Size() + gpu.MinimumMemory() + envconfig.GpuOverhead()
			if used.DeviceID == gpu.DeviceID && gpu.FreeMemory > need {
				left := gpu.FreeMemory - need
				request.PagedMirrors[gpu.ID] = left - left/16 // the graph may yet grow
			}
		}
	}
	if len(request.PagedMirrors) == 0 {
		return nil
	}
	p.mirrored = request.GPULayers
	return p.mirrored
}

// giveUp goes back to stock's way, from where it was left.
func (p *paging) giveUp(backoff float32) ml.GPULayersList {
	p.on, p.mirrored = false, nil
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
