package ollamarunner

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/ollama/ollama/kvtier/tierpb"
	"github.com/ollama/ollama/ml"
)

func TestTierWhereKVLieIsSaidByLayerAndEachIsCountedOnce(t *testing.T) {
	gpus := func(caches ...[]uint64) (gpus []ml.DeviceMemory) {
		for _, cache := range caches {
			gpus = append(gpus, ml.DeviceMemory{Cache: cache})
		}
		return gpus
	}
	cpu := func(cache, pinned []uint64) ml.DeviceMemory {
		return ml.DeviceMemory{Cache: cache, PagedMemory: ml.PagedMemory{Pinned: pinned}}
	}
	none := make([]uint64, 4) // three layers and the output
	for _, test := range []struct {
		name   string
		memory ml.BackendMemory
		paged  ml.PagedParams
		on     string
		want   *tierpb.CacheMemory
	}{
		{
			name: "no GPU", memory: ml.BackendMemory{CPU: cpu([]uint64{5, 5, 5, 0}, nil)},
			want: &tierpb.CacheMemory{HostLayers: 3, HostBytes: 15},
		},
		{
			name: "two GPUs", memory: ml.BackendMemory{CPU: cpu(none, nil), GPUs: gpus([]uint64{5, 0, 0, 0}, []uint64{0, 5, 5, 0})},
			want: &tierpb.CacheMemory{DeviceLayers: 3, DeviceBytes: 15},
		},
		{
			name: "paged, but for one layer", on: "1", paged: ml.PagedParams{PagedLayers: []int{1, 2}, PagedInTurn: true},
			memory: ml.BackendMemory{CPU: cpu(none, []uint64{0, 7, 7, 0}), GPUs: gpus([]uint64{5, 0, 0, 0})},
			want: &tierpb.CacheMemory{
				DeviceLayers: 1, DeviceBytes: 5, PinnedLayers: 2, PinnedBytes: 14, PagingAsked: true, InTurn: true,
			},
		},
		{
			name: "paged, with mirrors on two GPUs", on: "1",
			memory: ml.BackendMemory{CPU: cpu(none, []uint64{7, 7, 7, 0}), GPUs: []ml.DeviceMemory{
				{Cache: none, Graph: 9, PagedMemory: ml.PagedMemory{Mirrored: 3}},
				{Cache: none, Graph: 9, PagedMemory: ml.PagedMemory{Mirrored: 4}},
			}},
			want: &tierpb.CacheMemory{PinnedLayers: 3, PinnedBytes: 21, MirroredBytes: 7, PagingAsked: true},
		},
		{
			name: "a paged layer that has a state on its GPU", on: "1",
			memory: ml.BackendMemory{CPU: cpu(none, []uint64{7, 0, 0, 0}), GPUs: gpus([]uint64{5, 5, 0, 0})},
			want:   &tierpb.CacheMemory{DeviceLayers: 1, DeviceBytes: 10, PinnedLayers: 1, PinnedBytes: 7, PagingAsked: true},
		},
		{
			name: "asked for, and a layer is the CPU's", on: "1",
			memory: ml.BackendMemory{CPU: cpu([]uint64{5, 0, 0, 0}, none), GPUs: gpus([]uint64{0, 5, 5, 0})},
			want:   &tierpb.CacheMemory{HostLayers: 1, HostBytes: 5, DeviceLayers: 2, DeviceBytes: 10, PagingAsked: true},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("OLLAMA_PAGED_ATTN", test.on)
			if got := tierCacheMemory(test.memory, test.paged); !proto.Equal(got, test.want) {
				t.Errorf("%v, not %v", got, test.want)
			}
		})
	}
}

// tellingBackend is asked what mirrors have taken.
type tellingBackend struct {
	ml.Backend
	asked int
}

func (b *tellingBackend) KVPagedTell() { b.asked++ }

func TestTierABackendIsAskedForItsMirrorsOnlyWherePagingIsOn(t *testing.T) {
	for on, want := range map[string]int{"": 0, "1": 1} {
		t.Setenv("OLLAMA_PAGED_ATTN", on)
		backend := &tellingBackend{}
		tellMirrored(backend)
		tellMirrored(struct{ ml.Backend }{}) // one that has none
		if backend.asked != want {
			t.Errorf("OLLAMA_PAGED_ATTN=%s: asked %d times, not %d", on, backend.asked, want)
		}
	}
}
