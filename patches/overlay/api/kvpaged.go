package api

import "github.com/ollama/ollama/format"

// PagedModel is what ProcessModelResponse says of a model whose K/V are paged. It is empty for all others.
type PagedModel struct {
	// SizePinned is how much of Size is K/V in pinned memory of the system, of layers that a GPU computes.
	SizePinned int64 `json:"size_pinned,omitempty"`

	// SizeMirrored is how much of SizeVRAM holds the first part of that K/V as well.
	SizeMirrored int64 `json:"size_mirrored,omitempty"`
}

// Processor is what `ollama ps` says computes a model, given how many of its bytes are not on a GPU. Stock goes by the bytes, and takes
// paged K/V for layers of the CPU.
func (m PagedModel) Processor(stock string, elsewhere int64) string {
	if m.SizePinned <= 0 {
		return stock
	}
	if elsewhere <= m.SizePinned {
		stock = "100% GPU"
	}
	said := stock + ", K/V pinned: " + format.HumanBytes(m.SizePinned)
	if m.SizeMirrored > 0 {
		said += " (" + format.HumanBytes(m.SizeMirrored) + " of it on GPU as well)"
	}
	return said
}
