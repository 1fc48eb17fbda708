package ml

import (
	"context"
	"log/slog"

	"github.com/ollama/ollama/format"
)

// PagedParams is embedded in what a model is loaded with.
type PagedParams struct {
	// PagedLayers are the layers whose K/V lie in pinned system memory, which their device reads in place.
	PagedLayers []int `json:",omitempty"`

	// PagedInTurn says that no GPU has room for the copies of two layers: none is copied ahead of its turn.
	PagedInTurn bool `json:",omitempty"`

	// PagedMirrors is how many bytes of a GPU, by its ID, may hold the first cells of paged layers' K/V as well.
	PagedMirrors map[string]uint64 `json:",omitempty"`
}

// PagedMemory is embedded in DeviceMemory.
type PagedMemory struct {
	// Pinned, of the CPU, is the memory, by layer, that K/V of layers on a GPU take here. It is nil where no device of the
	// runner can read K/V in place.
	Pinned []uint64 `json:",omitempty"`

	// Mirrored, of a GPU, are the bytes of Graph that hold the first cells of paged K/V as well. They are taken last, and are
	// known when the model's memory is committed.
	Mirrored uint64 `json:",omitempty"`
}

// PinnedSize is the sum of Pinned, in bytes.
func (m PagedMemory) PinnedSize() uint64 { return sumMemory(m.Pinned) }

// MirroredSize is the sum of what all GPUs mirror of paged K/V, in bytes.
func (m BackendMemory) MirroredSize() (sum uint64) {
	for _, gpu := range m.GPUs {
		sum += gpu.Mirrored
	}
	return sum
}

// logPinned says how much K/V lie in pinned memory, as BackendMemory.Log does of other memory, and returns it.
func (m PagedMemory) logPinned(level slog.Level) uint64 {
	size := m.PinnedSize()
	if size > 0 {
		slog.Log(context.TODO(), level, "kv cache", "device", "Pinned", "size", format.HumanBytes2(size))
	}
	return size
}
