package kvcache

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/ml"
)

// A causal cache as the KV tiering sees it: which cells hold a sequence's positions, which are free, and the planes that their
// rows lie in.
//
// Locking: as for the other methods of Causal, the caller serialises everything here with StartForward and Remove.
// Reading rows needs their computation to have finished; writing needs that no unfinished batch writes the cells.

// KVTierLayer is the geometry of one layer's rows.
type KVTierLayer struct {
	Layer                       int
	KVHeads, KHeadDim, VHeadDim int
	KRowBytes, VRowBytes        int
}

// KVTierUnsupported returns why the rows of this cache can't be tiered, or "".
func (c *Causal) KVTierUnsupported() string {
	switch {
	case c.swaWindowSize != math.MaxInt32 || c.swaMemorySize != math.MaxInt32:
		return "sliding window attention"
	case c.chunkSize != 0:
		return "chunked attention"
	case c.DType != ml.DTypeF16:
		return "quantised K/V cache"
	case len(c.keys) == 0 || len(c.keys) != len(c.values):
		return "no K/V layers"
	}
	for layer, key := range c.keys {
		value, ok := c.values[layer]
		if !ok || key.DType() != c.DType || value.DType() != c.DType {
			return fmt.Sprintf("layer %d has no plain K and V", layer)
		}
		for _, t := range []ml.Tensor{key, value} {
			if _, ok := t.(rows.Tensor); !ok {
				return "backend without partial tensor access"
			}
		}
	}
	if c.config.PermutedV && !c.KVTierOnHost() {
		// One element of V at a time would cross the bus, with the runner's lock held.
		return "V is transposed on the device (OLLAMA_FLASH_ATTENTION=1 avoids that)"
	}
	return ""
}

// KVTierLayers returns the geometry of every layer that has K/V, by layer number.
func (c *Causal) KVTierLayers() []KVTierLayer {
	layers := make([]KVTierLayer, 0, len(c.keys))
	for layer, key := range c.keys {
		value := c.values[layer]
		vHeadDim := value.Dim(0)
		if c.config.PermutedV {
			vHeadDim = value.Dim(1)
		}
		layers = append(layers, KVTierLayer{
			Layer: layer, KVHeads: key.Dim(1), KHeadDim: key.Dim(0), VHeadDim: vHeadDim,
			KRowBytes: c.KVTierPlane(layer, false).RowBytes, VRowBytes: c.KVTierPlane(layer, true).RowBytes,
		})
	}
	slices.SortFunc(layers, func(a, b KVTierLayer) int { return a.Layer - b.Layer })
	return layers
}

// KVTierPlacement says of every layer whether its rows lie in host memory (h) or on a device (d).
func (c *Causal) KVTierPlacement() string {
	var s strings.Builder
	for _, l := range c.KVTierLayers() {
		if c.keys[l.Layer].(rows.Tensor).KVTierHost() != nil {
			s.WriteByte('h')
		} else {
			s.WriteByte('d')
		}
	}
	return s.String()
}

// KVTierOnHost reports whether the CPU can access all rows directly.
func (c *Causal) KVTierOnHost() bool {
	for layer := range c.keys {
		if c.keys[layer].(rows.Tensor).KVTierHost() == nil || c.values[layer].(rows.Tensor).KVTierHost() == nil {
			return false
		}
	}
	return true
}

// KVTierBatchCells returns a copy of the cells that the last StartForward assigned to its batch.
func (c *Causal) KVTierBatchCells() []int32 {
	return slices.Clone(c.tierLocs)
}

// KVTierCells returns the cell of every position of seq in [from, to), or nil if one is missing or held twice.
func (c *Causal) KVTierCells(seq int, from, to int32) []int32 {
	cells := make([]int32, to-from)
	found := 0
	seqRange, ok := c.cellRanges[seq]
	if !ok {
		return nil
	}
	seen := make([]bool, len(cells))
	for i := seqRange.min; i <= seqRange.max; i++ {
		pos := c.cells[i].pos
		if pos < from || pos >= to || !slices.Contains(c.cells[i].sequences, seq) {
			continue
		}
		if seen[pos-from] {
			return nil
		}
		seen[pos-from] = true
		cells[pos-from] = int32(i)
		found++
	}
	if found != len(cells) {
		return nil
	}
	return cells
}

// KVTierFreeCells returns the lowest free cells, at most n, none of which is in except.
func (c *Causal) KVTierFreeCells(n int, except map[int32]struct{}) []int32 {
	cells := make([]int32, 0, n)
	for i := range c.cells {
		if len(cells) == n {
			break
		}
		if len(c.cells[i].sequences) != 0 {
			continue
		}
		if _, ok := except[int32(i)]; !ok {
			cells = append(cells, int32(i))
		}
	}
	return cells
}

// KVTierOccupy gives cells to seq: cells[i] holds position from+i. The rows must have been written.
func (c *Causal) KVTierOccupy(seq int, from int32, cells []int32) {
	r, ok := c.cellRanges[seq]
	if !ok {
		r = newRange()
	}
	for i, cell := range cells {
		c.cells[cell] = cacheCell{pos: from + int32(i), sequences: []int{seq}}
		r.min = min(r.min, int(cell))
		r.max = max(r.max, int(cell))
	}
	c.cellRanges[seq] = r
}

// KVTierPlane returns a layer's K or V.
func (c *Causal) KVTierPlane(layer int, v bool) rows.Plane {
	key := c.keys[layer]
	if !v {
		return rows.Plane{Tensor: key.(rows.Tensor), RowBytes: key.Stride(2), Cells: len(c.cells)}
	}
	value := c.values[layer]
	p := rows.Plane{Tensor: value.(rows.Tensor), RowBytes: value.Stride(2), Cells: len(c.cells)}
	if c.config.PermutedV {
		p.RowBytes, p.Permuted = value.Dim(1)*value.Dim(2)*value.Stride(0), true
	}
	return p
}
