package kvcache

import (
	"math"
	"slices"

	"github.com/ollama/ollama/kvtier/rows"
)

// KVTierRows are the cells of a causal cache and the rows in them: the tier.Rows of the Go engine. A slot is a sequence.
//
// Locking: as for the methods of Causal, the caller serialises everything here with StartForward and Remove. Reading rows
// needs their computation to have finished; writing needs that no unfinished batch writes the cells.
type KVTierRows struct {
	cache  *Causal
	planes []rows.Plane // K and V of the first layer, of the second, …
}

// KVTierRows returns the rows of a cache that KVTierUnsupported has nothing against.
func (c *Causal) KVTierRows() *KVTierRows {
	r := &KVTierRows{cache: c}
	for _, l := range c.KVTierLayers() {
		r.planes = append(r.planes, c.tierPlane(l.Layer, false), c.tierPlane(l.Layer, true))
	}
	return r
}

// Cells returns the cell of every position of slot in [from, to), or nil if one is missing or held twice.
func (r *KVTierRows) Cells(slot, from, to int) []int32 {
	c := r.cache
	cells := make([]int32, to-from)
	found := 0
	seqRange, ok := c.cellRanges[slot]
	if !ok {
		return nil
	}
	seen := make([]bool, len(cells))
	for i := seqRange.min; i <= seqRange.max; i++ {
		pos := int(c.cells[i].pos)
		if pos < from || pos >= to || !slices.Contains(c.cells[i].sequences, slot) {
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

// Find returns the lowest free cells, at most n, none of which is in avoid: StartForward takes them in the same order,
// whatever the slot and the position.
func (r *KVTierRows) Find(_, _, n int, avoid map[int32]struct{}) []int32 {
	cells := make([]int32, 0, n)
	for i := range r.cache.cells {
		if len(cells) == n {
			break
		}
		if len(r.cache.cells[i].sequences) != 0 {
			continue
		}
		if _, ok := avoid[int32(i)]; !ok {
			cells = append(cells, int32(i))
		}
	}
	return cells
}

// Read copies the rows of cells into dst, one after the other.
func (r *KVTierRows) Read(segment int, cells []int32, dst []byte) { r.planes[segment].Read(cells, dst) }

// Write writes the rows of a chunk into cells.
func (r *KVTierRows) Write(segment int, cells []int32, chunk rows.Chunk) {
	r.planes[segment].Write(cells, chunk)
}

// Occupy gives cells to slot: cells[i] holds position from+i. The rows must have been written.
func (r *KVTierRows) Occupy(slot, from int, cells []int32) {
	c := r.cache
	seqRange, ok := c.cellRanges[slot]
	if !ok {
		seqRange = newRange()
	}
	for i, cell := range cells {
		c.cells[cell] = cacheCell{pos: int32(from + i), sequences: []int{slot}}
		seqRange.min = min(seqRange.min, int(cell))
		seqRange.max = max(seqRange.max, int(cell))
	}
	c.cellRanges[slot] = seqRange
}

// Drop takes the positions of slot from from on away.
func (r *KVTierRows) Drop(slot, from int) {
	_ = r.cache.Remove(slot, int32(from), math.MaxInt32)
}
