package tiering

import (
	"math"
	"slices"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
)

// Window is a cache of layers that keep only the last rows of a slot (sliding windows). Its rows are stored beside the chain, in
// window blocks, when a content ends, for that is the one position from which a runner could go on with them in memory, and before
// the last token of a prompt (prompt_end.go). They come back there only, all of them, and in the cells they lay in, where they
// would be summed in another order elsewhere (window_cells.go).
//
// The states of recurrent layers are a window of one row, which has all of them. There are some at checkpoints, wherever the
// runner has noted them.
type Window struct {
	Child  int
	Size   int // rows before a position that are kept, and wanted to resume there
	Cells  int
	DType  string
	Layers []kvtier.Layer
	Rows   WindowRows

	// FreeCells returns n cells, or as many as there are, that nobody but slot has a row in, none of which is in avoid. Not nil where
	// rows may come back in any cells: the layers sum in the order of positions.
	FreeCells func(slot, n int, avoid map[int32]struct{}) []int32

	// Checkpoints returns the positions that a slot's states were noted at; nil for a sliding window.
	Checkpoints func(slot int) []int
}

// WindowRows are the cells of a window's cache. Segments are numbered as in a block of its layers. Everything is called under
// the Host's lock.
type WindowRows interface {
	// Cells, Read, Write, Occupy and Drop are those of Rows.
	Cells(slot, from, to int) []int32
	Read(segment int, cells []int32, dst []byte)
	Write(segment int, cells []int32, chunk rows.Chunk)
	Occupy(slot, from int, cells []int32)
	Drop(slot, from int)

	// Free reports whether nobody but slot has a row in any of the cells, which are all different, and none is in avoid.
	Free(slot int, cells []int32, avoid map[int32]struct{}) bool
}

// windowPart is one block of a window. cells are those that its rows lie in.
type windowPart struct {
	window *Window
	block  kvtier.WindowBlock
	cells  []int32
}

// windowParts are the blocks of a window that ends at the end of tokens, in order, without cells. on names the blocks of the
// chain; the last one may be a tail.
func windowParts(w *Window, tokens []byte, on func(block int) kvtier.Key) (parts []windowPart) {
	end := len(tokens) / 4
	for at := max(0, end-w.Size); at < end; {
		part := w.part(tokens, at, on)
		parts = append(parts, part)
		at += part.block.Rows()
	}
	return parts
}

// part is the block, without cells, that begins at a position of a window that ends at the end of tokens.
func (w *Window) part(tokens []byte, at int, on func(block int) kvtier.Key) windowPart {
	number := at / kvtier.BlockTokens
	to := min(4*(number+1)*kvtier.BlockTokens, len(tokens))
	return windowPart{window: w, block: kvtier.WindowBlock{
		On: on(number), Child: w.Child, First: at % kvtier.BlockTokens, Position: at,
		Tokens: tokens[4*at : to : to], Last: to == len(tokens),
	}}
}

// storable is how many of a slot's first rows are of use to anybody: where layers are recurrent those up to the last checkpoint.
// From there on a runner computes again, and not always the same bits: in other batches.
func (t *Tiering) storable(slot, rows int) int {
	for _, w := range t.model.Windows {
		if w.Checkpoints != nil {
			rows = lastUpTo(rows, w.Checkpoints(slot))
		}
	}
	return rows
}

// lastUpTo returns the greatest of the numbers that are not greater than most, or 0.
func lastUpTo(most int, numbers []int) (best int) {
	for _, n := range numbers {
		if n <= most {
			best = max(best, n)
		}
	}
	return best
}

// windowEnds returns the positions at which a window of the content, of so many rows, is to be stored, and was not before.
func (l *lineage) windowEnds(w *Window, rows int) (ends []int) {
	if w.Checkpoints == nil {
		if l.finished && l.windowsAt != rows {
			ends = append(ends, rows)
		}
		return ends
	}
	for _, end := range w.Checkpoints(l.slot) {
		// Until the content has ended, the last block that is not whole is no block.
		if end > l.windowsAt && end <= rows && (l.finished || end <= len(l.chain)*kvtier.BlockTokens) {
			ends = append(ends, end)
		}
	}
	return ends
}

// planWindows adds the window blocks of a content of so many rows, all of whose blocks are planned or stored. The caller holds
// the Host's lock.
func (l *lineage) planWindows(t *Tiering, rows int) {
	planned := l.windowsAt
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		for _, end := range l.windowEnds(w, rows) {
			l.planWindow(t, w, end, rows)
			planned = end
		}
	}
	l.windowsAt = planned
}

// on is a block of a content of so many rows; the last one may be a tail.
func (l *lineage) on(number, rows int) *link {
	first := number * kvtier.BlockTokens
	switch {
	case number < len(l.chain):
		return l.chain[number]
	case l.end != nil && l.end.first == first && l.end.rows == rows-first:
		return l.end
	}
	return l.linkOf(first, rows-first)
}

// unnamed stands for the names of blocks of the chain that are not known yet.
func unnamed(int) kvtier.Key { return kvtier.Key{} }

// planWindow adds the blocks of a window that ends at a position of a content of so many rows.
func (l *lineage) planWindow(t *Tiering, w *Window, end, rows int) {
	from := max(0, end-w.Size)
	cells := w.Rows.Cells(l.slot, from, end)
	if cells == nil {
		return
	}
	var of []*block
	for _, part := range windowParts(w, l.tokens[:4*end], unnamed) {
		part.lieIn(cells[part.block.Position-from:])
		of = append(of, t.windowBlock(part, of))
	}
	l.addWindow(of, rows)
}

// windowBlock is the block of a part, after the others of its window; what it hangs on is not known yet.
func (t *Tiering) windowBlock(part windowPart, others []*block) *block {
	b := &block{first: part.block.Position - part.block.First, rows: part.block.Rows(), part: &part}
	if part.block.Last {
		b.others = slices.Clone(others)
	}
	b.layout = t.layout(b.rows, part.window)
	return b
}

// addWindow adds the blocks of a window of a content of so many rows.
func (l *lineage) addWindow(of []*block, rows int) {
	for _, b := range of {
		b.link = l.on(b.first/kvtier.BlockTokens, rows)
	}
	l.blocks = append(l.blocks, of...)
}

// exportWindow copies a window block's rows out of the cells. They are there until the slot goes on.
func (t *Tiering) exportWindow(l *lineage, b *block) {
	w, from := b.part.window, b.part.block.Position
	cells := w.Rows.Cells(l.slot, from, from+b.rows)
	if l.present != math.MaxInt || !slices.Equal(cells, b.part.cells) { // the slot has gone on
		b.lost = true
		return
	}
	for i, s := range b.layout.Segments {
		w.Rows.Read(i, cells, b.payload[s.Offset:s.Offset+s.Bytes])
	}
	b.copied = true
}

func layerBytes(layers []kvtier.Layer) (n uint64) {
	for _, l := range layers {
		n += uint64(l.RowBytes(false) + l.RowBytes(true))
	}
	return n
}
