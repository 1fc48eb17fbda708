package kvcache

import "slices"

// KVTierWindow is a child that drops rows: its layers see the last ones only.
type KVTierWindow struct {
	Child int
	Size  int // rows that it keeps before the position that a slot goes on from: as many as its layers see, or more
	Still int // of those, the last that it has when a sequence has ended
	Cells int
	Rows  *KVTierRows
	cache *Causal
}

// Windows returns the children that drop rows and have layers, in their order.
func (c *KVTierCache) Windows() (windows []KVTierWindow) {
	for number, child := range c.children {
		if !child.tierDrops() || len(child.keys) == 0 {
			continue
		}
		w := KVTierWindow{
			Child: number, Size: int(child.swaMemorySize), Still: child.tierKeeps(), Cells: len(child.cells),
			Rows: &KVTierRows{children: []*Causal{child}}, cache: child,
		}
		for _, l := range c.Layers() {
			if l.Child == number {
				w.Rows.planes = append(w.Rows.planes, child.tierPlane(l.Layer, false), child.tierPlane(l.Layer, true))
			}
		}
		windows = append(windows, w)
	}
	return windows
}

// tierKeeps is how many rows before the position that a slot goes on from the cache still has when a sequence has ended. For several
// slots stock keeps one more than layers see, which the batch that was built ahead has pushed out then. Where rows must come
// back into their cells it is needed nevertheless: its cell must not be free.
func (c *Causal) tierKeeps() int {
	if c.swaMemorySize == c.swaWindowSize+1 {
		return int(c.swaWindowSize)
	}
	return int(c.swaMemorySize)
}

// BatchCells returns the cells that the last StartForward assigned to its batch.
func (w KVTierWindow) BatchCells() []int32 { return slices.Clone(w.cache.tierLocs) }

// Free reports whether nobody but slot has a row in any of cells, and none is in avoid. No cell may be named twice.
func (r *KVTierRows) Free(slot int, cells []int32, avoid map[int32]struct{}) bool {
	seen := make(map[int32]struct{}, len(cells))
	for _, cell := range cells {
		_, pending := avoid[cell]
		_, twice := seen[cell]
		seen[cell] = struct{}{}
		if pending || twice || slices.ContainsFunc(r.children, func(c *Causal) bool {
			return int(cell) >= len(c.cells) || slices.ContainsFunc(c.cells[cell].sequences, func(s int) bool { return s != slot })
		}) {
			return false
		}
	}
	return true
}

// FreeCells returns the lowest n cells, or as many as there are, that nobody but slot has a row in, none of which is in avoid.
func (r *KVTierRows) FreeCells(slot, n int, avoid map[int32]struct{}) (cells []int32) {
	for cell := range int32(len(r.children[0].cells)) {
		if len(cells) == n {
			break
		}
		if r.Free(slot, []int32{cell}, avoid) {
			cells = append(cells, cell)
		}
	}
	return cells
}
