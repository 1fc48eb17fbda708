package kvcache

import (
	"math"
	"slices"

	"github.com/ollama/ollama/kvtier/rows"
)

// KVTierRows are the cells of a model's cache and the rows in them: the tier.Rows of the Go engine. A slot is a sequence.
//
// Locking: as for the methods of Causal, the caller serialises everything here with StartForward and Remove. Reading rows
// needs their computation to have finished; writing needs that no unfinished batch writes the cells.
type KVTierRows struct {
	children []*Causal
	planes   []rows.Plane // K and V of the first layer, of the second, …
}

// Rows returns the rows of the children that keep every row.
func (c *KVTierCache) Rows() *KVTierRows {
	r := &KVTierRows{children: c.kept()}
	for _, l := range c.Layers() {
		if !l.Drops {
			child := c.children[l.Child]
			r.planes = append(r.planes, child.tierPlane(l.Layer, false), child.tierPlane(l.Layer, true))
		}
	}
	return r
}

// Cells returns the cell of every position of slot in [from, to), or nil if one is missing, held twice, or elsewhere in
// another child.
func (r *KVTierRows) Cells(slot, from, to int) []int32 {
	cells := r.children[0].tierCells(slot, from, to)
	for _, child := range r.children[1:] {
		if cells == nil || !slices.Equal(child.tierCells(slot, from, to), cells) {
			return nil
		}
	}
	return cells
}

// tierCells is Cells of one child.
func (c *Causal) tierCells(slot, from, to int) []int32 {
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

// Find returns the lowest cells that are free in every child, at most n, none of which is in avoid: StartForward takes them
// in the same order, whatever the slot and the position.
func (r *KVTierRows) Find(_, _, n int, avoid map[int32]struct{}) []int32 {
	cells := make([]int32, 0, n)
	for i := range r.children[0].cells {
		if len(cells) == n {
			break
		}
		if slices.ContainsFunc(r.children, func(c *Causal) bool { return len(c.cells[i].sequences) != 0 }) {
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

// Memory returns where the rows of cells lie, or nil.
func (r *KVTierRows) Memory(segment int, cells []int32) [][]byte {
	return r.planes[segment].Memory(cells)
}

// Occupy gives cells to slot, in every child: cells[i] holds position from+i. The rows must have been written.
func (r *KVTierRows) Occupy(slot, from int, cells []int32) {
	for _, c := range r.children {
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
}

// Drop takes the positions of slot from from on away, in every child.
func (r *KVTierRows) Drop(slot, from int) {
	for _, c := range r.children {
		_ = c.Remove(slot, int32(from), math.MaxInt32)
	}
}
