package llm

import (
	"slices"
	"strings"
	"testing"

	"github.com/ollama/ollama/api"
	"github.com/ollama/ollama/format"
	"github.com/ollama/ollama/kvpaged"
	"github.com/ollama/ollama/ml"
)

const (
	pagedMiB    = format.MebiByte
	pagedBlocks = 8
)

// pagedRunner answers load requests as a runner with such a model would.
type pagedRunner struct {
	weights, cache, graph uint64 // of each layer, its K/V, and of each GPU that is used
	able                  bool   // libggml-cuda-tiering.so is there
	state                 uint64 // of a recurrent layer 0, in place of its K/V: it cannot be paged
	unplanned             uint64 // what mirrors take more than they may
}

func (r pagedRunner) memory(server *ollamaServer, gpus []ml.DeviceInfo, layout ml.GPULayersList) *ml.BackendMemory {
	row := func() []uint64 { return make([]uint64, pagedBlocks+1) }
	memory := &ml.BackendMemory{CPU: ml.DeviceMemory{Weights: row(), Cache: row()}}
	if r.able {
		memory.CPU.Pinned = row()
	}
	for _, gpu := range gpus {
		memory.GPUs = append(memory.GPUs, ml.DeviceMemory{DeviceID: gpu.DeviceID, Weights: row(), Cache: row()})
	}
	for layer := range pagedBlocks + 1 {
		on := &memory.CPU
		for i, gpu := range memory.GPUs {
			for _, part := range layout {
				if part.DeviceID == gpu.DeviceID && slices.Contains(part.Layers, layer) {
					on = &memory.GPUs[i]
					on.Graph = max(on.Graph, r.graph)
				}
			}
		}
		on.Weights[layer] = r.weights
		switch {
		case layer == pagedBlocks:
		case layer == 0 && r.state > 0:
			on.Cache[0] = r.state
		case r.able && on != &memory.CPU && slices.Contains(server.loadRequest.PagedLayers, layer):
			memory.CPU.Pinned[layer] = r.cache
			on.Graph = r.graph + 2*r.cache // staging
			if server.loadRequest.PagedInTurn {
				on.Graph = r.graph + r.cache
			}
		default:
			on.Cache[layer] = r.cache
		}
	}
	for i := range memory.GPUs {
		var most uint64 // all cells
		for layer := range pagedBlocks {
			if memory.CPU.Pinned != nil && memory.GPUs[i].Weights[layer] > 0 {
				most += memory.CPU.Pinned[layer]
			}
		}
		if room := min(most, server.loadRequest.PagedMirrors[memory.GPUs[i].ID]); room > 0 {
			memory.GPUs[i].Graph += room + r.unplanned
		}
	}
	return memory
}

func pagedServer() *ollamaServer {
	return &ollamaServer{llmServer: llmServer{
		totalLayers: pagedBlocks + 1,
		options:     api.Options{Runner: api.Runner{NumGPU: -1}},
		loadRequest: LoadRequest{FlashAttention: ml.FlashAttentionEnabled, KvSize: 4096},
	}}
}

func pagedGPUs(free ...int) []ml.DeviceInfo {
	var gpus []ml.DeviceInfo
	for i, mib := range free {
		id := ml.DeviceID{ID: string(rune('a' + i)), Library: "CUDA"}
		gpus = append(gpus, ml.DeviceInfo{DeviceID: id, FreeMemory: uint64((457 + mib) * pagedMiB)})
	}
	return gpus
}

// pagedLoad asks as Load does, until the plan stays; it returns the last layout of stock's, and what the runner then needs.
func pagedLoad(t *testing.T, s *ollamaServer, r pagedRunner, gpus []ml.DeviceInfo) (ml.GPULayersList, *ml.BackendMemory, error) {
	t.Helper()
	system := ml.SystemInfo{TotalMemory: 64 << 30, FreeMemory: 60 << 30}
	p := s.startPaging(system, gpus, false)
	layout, err := s.createLayout(system, gpus, nil, false, 0)
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[uint64]bool)
	for range 20 {
		s.loadRequest.GPULayers = layout
		memory := r.memory(s, gpus, layout)
		seen[layout.Hash()] = true
		better, err := p.layout(memory, 0)
		if err != nil {
			return nil, nil, err
		}
		if better == nil {
			stock, _ := s.buildLayout(gpus, memory, false, 0)
			if seen[stock.Hash()] || stock.Sum() > layout.Sum() {
				return layout, memory, nil
			}
			better = stock
		}
		layout = better
	}
	t.Fatal("the plan does not come to an end")
	return nil, nil, nil
}

func TestPagedLayersAreAsFewAsItTakes(t *testing.T) {
	for _, test := range []struct {
		name   string
		runner pagedRunner
		gpus   []int
		layers int // on GPUs
		paged  int
	}{
		{"all fits", pagedRunner{weights: 10, cache: 20, graph: 20, able: true}, []int{300}, 9, 0},
		{"some K/V do not", pagedRunner{weights: 10, cache: 40, graph: 20, able: true}, []int{300}, 9, 6},
		{"no K/V do", pagedRunner{weights: 10, cache: 80, graph: 20, able: true}, []int{300}, 9, 8},
		{"weights do not", pagedRunner{weights: 50, cache: 40, graph: 20, able: true}, []int{300}, 3, 0},
		{"staging of two layers does not", pagedRunner{weights: 10, cache: 120, graph: 20, able: true}, []int{300}, 9, 8},
		{"staging does not", pagedRunner{weights: 10, cache: 200, graph: 20, able: true}, []int{300}, 1, 0},
		{"no library", pagedRunner{weights: 10, cache: 40, graph: 20}, []int{300}, 5, 0},
		{"a state stays", pagedRunner{weights: 10, cache: 40, graph: 20, able: true, state: 20}, []int{300}, 9, 5},
		{"a large state stays", pagedRunner{weights: 10, cache: 40, graph: 20, able: true, state: 60}, []int{300}, 9, 7},
		{"two GPUs hold it", pagedRunner{weights: 10, cache: 40, graph: 20, able: true}, []int{300, 300}, 9, 0},
		{"two GPUs do not", pagedRunner{weights: 10, cache: 80, graph: 20, able: true}, []int{300, 300}, 9, 7},
		{"of two GPUs one is small", pagedRunner{weights: 10, cache: 40, graph: 20, able: true}, []int{300, 60}, 9, 6},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("OLLAMA_PAGED_ATTN", "1")
			t.Setenv("OLLAMA_PAGED_MIRROR", "0")
			for _, size := range []*uint64{&test.runner.weights, &test.runner.cache, &test.runner.graph, &test.runner.state} {
				*size *= pagedMiB
			}
			s, gpus := pagedServer(), pagedGPUs(test.gpus...)
			layout, memory, err := pagedLoad(t, s, test.runner, gpus)
			if err != nil {
				t.Fatal(err)
			}
			if paged := s.loadRequest.PagedLayers; layout.Sum() != test.layers || len(paged) != test.paged {
				t.Errorf("%d layers on GPUs, not %d; %v paged, not %d layers", layout.Sum(), test.layers, paged, test.paged)
			}
			for _, gpu := range memory.GPUs {
				for _, info := range gpus {
					if info.DeviceID == gpu.DeviceID && gpu.Size() > info.FreeMemory-info.MinimumMemory() {
						t.Errorf("GPU %s needs %d MiB of %d", gpu.ID, gpu.Size()/pagedMiB, info.FreeMemory/pagedMiB-457)
					}
				}
			}
		})
	}
}

func TestPagedMirrorsTakeWhatIsLeft(t *testing.T) {
	for _, test := range []struct {
		name      string
		env       map[string]string
		cache     uint64
		unplanned uint64
		gpus      []int
		paged     int
		mirrors   []uint64 // MiB at least, of each GPU; none: no mirrors
	}{
		{"all fits", nil, 20, 0, []int{300}, 0, nil},
		{"all are paged", nil, 40, 0, []int{300}, 8, []uint64{100}}, // 300 - 9 x 10 - 20 - 2 x 40
		{"as many as may be pinned", map[string]string{"OLLAMA_PAGED_HOST_GB": "0.28"}, 40, 0, []int{300}, 7, []uint64{60}},
		{"as few as it takes", map[string]string{"OLLAMA_PAGED_MIRROR": "0"}, 40, 0, []int{300}, 6, nil},
		{"a fixed number", map[string]string{"OLLAMA_PAGED_HOT_LAYERS": "5"}, 10, 0, []int{300}, 3, []uint64{100}},
		{"each GPU its own", nil, 80, 0, []int{300, 400}, 8, []uint64{60, 100}},
		{"more than planned", nil, 40, 50, []int{300}, 6, nil},
		{"no room for copies ahead", nil, 120, 0, []int{300}, 8, []uint64{60}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("OLLAMA_PAGED_ATTN", "1")
			for key, value := range test.env {
				t.Setenv(key, value)
			}
			s, gpus := pagedServer(), pagedGPUs(test.gpus...)
			runner := pagedRunner{weights: 10 * pagedMiB, cache: test.cache * pagedMiB, graph: 20 * pagedMiB, able: true, unplanned: test.unplanned * pagedMiB}
			layout, memory, err := pagedLoad(t, s, runner, gpus)
			request := &s.loadRequest
			if err != nil || layout.Sum() != 9 || len(request.PagedLayers) != test.paged || len(request.PagedMirrors) != len(test.mirrors) {
				t.Fatalf("%d layers on GPUs, %v paged, mirrors %v, %v", layout.Sum(), request.PagedLayers, request.PagedMirrors, err)
			}
			for i, gpu := range gpus {
				if memory.GPUs[i].Size() > gpu.FreeMemory-gpu.MinimumMemory() {
					t.Errorf("GPU %s needs %d MiB", gpu.ID, memory.GPUs[i].Size()/pagedMiB)
				}
				if test.mirrors != nil && request.PagedMirrors[gpu.ID] < test.mirrors[i]*pagedMiB {
					t.Errorf("GPU %s has mirrors of %d MiB, not %d", gpu.ID, request.PagedMirrors[gpu.ID]/pagedMiB, test.mirrors[i])
				}
			}
		})
	}
}

func TestPagedFewLayersBringNoOthersWithThem(t *testing.T) {
	p := &paging{mirrors: true, budget: kvpaged.Budget{Bytes: 100}}
	sizes := slices.Repeat([]uint64{1}, 32)
	for _, test := range []struct{ needed, more int }{{1, 0}, {7, 0}, {8, 24}, {31, 1}, {32, 0}} {
		order := kvpaged.Order(sizes)[test.needed:]
		if more := p.alsoPaged(order, sizes, uint64(test.needed)); len(more) != test.more {
			t.Errorf("%d layers have to be paged, and %d others are, not %d", test.needed, len(more), test.more)
		}
	}
}

func TestPagedMirrorsGoFirst(t *testing.T) {
	t.Setenv("OLLAMA_PAGED_ATTN", "1")
	s, gpus := pagedServer(), pagedGPUs(300)
	runner := pagedRunner{weights: 10 * pagedMiB, cache: 40 * pagedMiB, graph: 20 * pagedMiB, able: true}
	system := ml.SystemInfo{TotalMemory: 64 << 30, FreeMemory: 60 << 30}
	p := s.startPaging(system, gpus, false)
	layout, _ := s.createLayout(system, pagedGPUs(9000), runner.memory(s, gpus, nil), false, 0)
	for range 3 {
		s.loadRequest.GPULayers = layout
		if next, _ := p.layout(runner.memory(s, gpus, layout), 0); next != nil {
			layout = next
		}
	}
	if len(s.loadRequest.PagedMirrors) == 0 {
		t.Fatal("no mirrors to begin with")
	}
	// what the plan needs could not be allocated
	next, err := p.layout(runner.memory(s, gpus, layout), 0.1)
	if err != nil || next.Sum() != 9 || s.loadRequest.PagedMirrors != nil || len(s.loadRequest.PagedLayers) == 8 {
		t.Errorf("%d layers, %v paged, mirrors %v, %v", next.Sum(), s.loadRequest.PagedLayers, s.loadRequest.PagedMirrors, err)
	}
	for next != nil {
		layout = next
		if next, err = p.layout(runner.memory(s, gpus, layout), 0); err != nil {
			t.Fatal(err)
		}
	}
	if layout.Sum() != 9 || s.loadRequest.PagedMirrors != nil || len(s.loadRequest.PagedLayers) != 6 {
		t.Errorf("in the end %v are paged, mirrors %v", s.loadRequest.PagedLayers, s.loadRequest.PagedMirrors)
	}
}

func TestPagedOffNothingIsPlanned(t *testing.T) {
	runner := pagedRunner{weights: 10 * pagedMiB, cache: 40 * pagedMiB, graph: 20 * pagedMiB, able: true}
	for name, change := range map[string]func(t *testing.T, s *ollamaServer){
		"variable unset":   func(t *testing.T, s *ollamaServer) { t.Setenv("OLLAMA_PAGED_ATTN", "") },
		"no flash":         func(t *testing.T, s *ollamaServer) { s.loadRequest.FlashAttention = ml.FlashAttentionDisabled },
		"fewer on purpose": func(t *testing.T, s *ollamaServer) { s.options.NumGPU = 5 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("OLLAMA_PAGED_ATTN", "1")
			s := pagedServer()
			change(t, s)
			if layout, _, err := pagedLoad(t, s, runner, pagedGPUs(300)); err != nil || layout.Sum() != 5 || s.loadRequest.PagedLayers != nil {
				t.Errorf("%d layers on the GPU, %v paged, %v", layout.Sum(), s.loadRequest.PagedLayers, err)
			}
		})
	}
}

func TestPagedWaitsWhileOtherModelsMayBeUnloaded(t *testing.T) {
	t.Setenv("OLLAMA_PAGED_ATTN", "1")
	s, gpus := pagedServer(), pagedGPUs(300)
	runner := pagedRunner{weights: 10 * pagedMiB, cache: 40 * pagedMiB, graph: 20 * pagedMiB, able: true}
	p := s.startPaging(ml.SystemInfo{TotalMemory: 64 << 30, FreeMemory: 60 << 30}, gpus, true)
	full, _ := s.buildLayout(pagedGPUs(9000), runner.memory(s, gpus, nil), false, 0)
	if layout, err := p.layout(runner.memory(s, gpus, full), 0); layout != nil || err != nil {
		t.Errorf("%v, %v", layout, err)
	}
}

func TestPagedForcedLayersArePagedToo(t *testing.T) {
	t.Setenv("OLLAMA_PAGED_ATTN", "1")
	t.Setenv("OLLAMA_PAGED_MIRROR", "0")
	s, gpus := pagedServer(), pagedGPUs(300)
	s.options.NumGPU = 999
	runner := pagedRunner{weights: 10 * pagedMiB, cache: 40 * pagedMiB, graph: 20 * pagedMiB, able: true}
	if layout, _, err := pagedLoad(t, s, runner, gpus); err != nil || layout.Sum() != 9 || len(s.loadRequest.PagedLayers) != 6 {
		t.Errorf("%d layers on the GPU, %v paged, %v", layout.Sum(), s.loadRequest.PagedLayers, err)
	}
	if s.options.NumGPU != 999 {
		t.Errorf("num_gpu is %d now", s.options.NumGPU)
	}
}

func TestPagedMoreThanMayBePinnedIsRefusedInWords(t *testing.T) {
	runner := pagedRunner{weights: 10 * pagedMiB, cache: 40 * pagedMiB, graph: 20 * pagedMiB, able: true}
	for name, environment := range map[string]map[string]string{
		"by the plan":       {"OLLAMA_PAGED_HOST_GB": "0.1"},
		"by a fixed number": {"OLLAMA_PAGED_HOST_GB": "0.1", "OLLAMA_PAGED_HOT_LAYERS": "0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("OLLAMA_PAGED_ATTN", "1")
			for key, value := range environment {
				t.Setenv(key, value)
			}
			_, _, err := pagedLoad(t, pagedServer(), runner, pagedGPUs(300))
			if err == nil || !strings.Contains(err.Error(), "OLLAMA_PAGED_HOST_GB=0.1") || !strings.Contains(err.Error(), "4096 cells") {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestPagedAFixedNumberStays(t *testing.T) {
	t.Setenv("OLLAMA_PAGED_ATTN", "1")
	t.Setenv("OLLAMA_PAGED_HOT_LAYERS", "5")
	for cache, fits := range map[uint64]bool{10: true, 40: false} {
		s := pagedServer()
		runner := pagedRunner{weights: 10 * pagedMiB, cache: cache * pagedMiB, graph: 20 * pagedMiB, able: true}
		layout, _, err := pagedLoad(t, s, runner, pagedGPUs(300))
		if err != nil || (layout.Sum() == 9) != fits || !slices.Equal(s.loadRequest.PagedLayers, []int{3, 5, 7}) {
			t.Errorf("%d MiB a layer: %d layers on the GPU, %v paged, %v", cache, layout.Sum(), s.loadRequest.PagedLayers, err)
		}
	}
}

func TestPagedMemoryIsCountedAsTheSystems(t *testing.T) {
	memory := ml.DeviceMemory{Cache: []uint64{1, 2}, PagedMemory: ml.PagedMemory{Pinned: []uint64{10, 20}, Mirrored: 5}}
	if memory.Size() != 33 || memory.PinnedSize() != 30 {
		t.Errorf("%d, %d", memory.Size(), memory.PinnedSize())
	}
	s := pagedServer()
	big := &ml.BackendMemory{CPU: ml.DeviceMemory{PagedMemory: ml.PagedMemory{Pinned: []uint64{3 << 30}}}}
	if err := s.verifyLayout(ml.SystemInfo{FreeMemory: 2 << 30}, nil, big, false, nil, nil); err == nil {
		t.Error("more than the system has is not refused")
	}
}

func TestWhatIsPinnedIsToldOfAModel(t *testing.T) {
	s := pagedServer()
	if told := PagedModelOf(s); told.SizePinned != 0 {
		t.Errorf("%d bytes of a model that is not loaded", told.SizePinned)
	}
	s.mem = &ml.BackendMemory{CPU: ml.DeviceMemory{Cache: []uint64{9, 0, 0}, PagedMemory: ml.PagedMemory{Pinned: []uint64{0, 3, 4}}}}
	if told := PagedModelOf(s); told.SizePinned != 7 || told.SizeMirrored != 0 {
		t.Errorf("%d bytes, not 7; %d mirrored", told.SizePinned, told.SizeMirrored)
	}
	for _, size := range []uint64{2, 3} {
		s.mem.GPUs = append(s.mem.GPUs, ml.DeviceMemory{Graph: 9, PagedMemory: ml.PagedMemory{Mirrored: size}})
	}
	if told := PagedModelOf(s); told.SizePinned != 7 || told.SizeMirrored != 5 {
		t.Errorf("%d bytes pinned, not 7; %d mirrored, not 5", told.SizePinned, told.SizeMirrored)
	}
	if told := PagedModelOf(&llamaServer{}); told.SizePinned != 0 {
		t.Errorf("%d bytes of a model of the other engine", told.SizePinned)
	}
}
