package ollamarunner

import (
	"github.com/ollama/ollama/kvpaged"
	"github.com/ollama/ollama/kvtier/tierpb"
	"github.com/ollama/ollama/llm"
	"github.com/ollama/ollama/ml"
)

// tellMirrored has a backend that can page K/V note what mirrors of them have taken, for the server and for reports.
func tellMirrored(backend ml.Backend) {
	if b, ok := backend.(interface{ KVPagedTell() }); ok && kvpaged.On() {
		b.KVPagedTell()
	}
}

// tierCacheMemory says where the K/V of a model lie, for reports: what was allocated, not what was planned. A layer is counted
// once, where most depends on it: as paged, if any of it is; else as the CPU's, if any of it is.
func tierCacheMemory(memory ml.BackendMemory, paged ml.PagedParams) *tierpb.CacheMemory {
	said := &tierpb.CacheMemory{PagingAsked: kvpaged.On(), InTurn: paged.PagedInTurn, MirroredBytes: memory.MirroredSize()}
	device := make([]uint64, len(memory.CPU.Cache))
	for _, gpu := range memory.GPUs {
		for layer, size := range gpu.Cache {
			device[layer] += size
		}
	}
	for layer, host := range memory.CPU.Cache {
		var pinned uint64
		if memory.CPU.Pinned != nil {
			pinned = memory.CPU.Pinned[layer]
		}
		switch {
		case pinned > 0:
			said.PinnedLayers++
		case host > 0:
			said.HostLayers++
		case device[layer] > 0:
			said.DeviceLayers++
		}
		said.PinnedBytes += pinned
		said.HostBytes += host
		said.DeviceBytes += device[layer]
	}
	return said
}

// tierSettings are those of a load request, for reports. Its slots share the rows.
func tierSettings(loaded llm.LoadRequest) *tierpb.RunnerSettings {
	return &tierpb.RunnerSettings{
		ContextTokens: uint32(loaded.KvSize / max(loaded.Parallel, 1)), Slots: uint32(loaded.Parallel),
		BatchTokens: uint32(loaded.BatchSize), Threads: uint32(loaded.NumThreads),
	}
}
