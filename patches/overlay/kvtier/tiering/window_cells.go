package tiering

import (
	"maps"

	"github.com/ollama/ollama/kvtier"
)

// Where attention sums in the order of cells, rows come back into the cells that they lay in, and a block names those. Where it
// sums in the order of positions any cells will do; what a block names then is the place of each row in its block, so that the
// same rows have the same key.

// lieIn says which cells the rows of the part lie in: the first of cells.
func (p *windowPart) lieIn(cells []int32) {
	p.cells = cells[:p.block.Rows()]
	p.block.Cells = p.cells
	if p.window.FreeCells != nil {
		p.block.Cells = make([]int32, p.block.Rows())
		for i := range p.block.Cells {
			p.block.Cells[i] = int32(p.block.First + i)
		}
	}
}

// named is how many cells the blocks of a window may name.
func (w *Window) named() int {
	if w.FreeCells != nil {
		return kvtier.BlockTokens
	}
	return w.Cells
}

// placeWindows gives each fetched block the cells that its rows are to have: none of which another slot has, nor a batch that is
// built, nor the end of a prompt that is still to be copied. It reports whether there are such cells.
func (t *Tiering) placeWindows(f *fetch, slot int) bool {
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		avoid := make(map[int32]struct{})
		maps.Copy(avoid, t.host.AvoidWindow(w.Child))
		for n := range t.slots {
			if p := t.slots[n].lineage.promptEnd; p != nil && !p.copied {
				for _, cell := range p.cells[i] {
					avoid[cell] = struct{}{}
				}
			}
		}
		named := f.namedCells(w)
		cells := named
		if w.FreeCells != nil {
			if cells = w.FreeCells(slot, len(named), avoid); len(cells) < len(named) {
				return false
			}
		} else if !w.Rows.Free(slot, named, avoid) {
			return false
		}
		for _, part := range f.windows {
			if part.window == w {
				part.cells, cells = cells[:part.block.Rows()], cells[part.block.Rows():]
			}
		}
	}
	return true
}

// namedCells are those that the fetched blocks of a window name, in the order of the blocks.
func (f *fetch) namedCells(w *Window) (cells []int32) {
	for _, part := range f.windows {
		if part.window == w {
			cells = append(cells, part.block.Cells...)
		}
	}
	return cells
}
