package tier

import (
	"context"
	"fmt"
	"slices"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// Window is a cache of layers that keep only the last rows of a slot (sliding windows). Its rows are stored beside the chain, in
// window blocks, when a content ends, for that is the one position from which a runner could go on with them in memory. They
// come back there only, all of them, and in the cells they lay in: elsewhere they would be summed in another order.
type Window struct {
	Child  int
	Size   int // rows before a position that are kept, and wanted to resume there
	Cells  int
	Layers []kvtier.Layer
	Rows   WindowRows
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

// windowPart is what a window block has of a window that ends at a position.
type windowPart struct {
	window *Window
	block  kvtier.WindowBlock
}

// windowParts are the window blocks of all windows that end at the end of tokens, in order. on names the blocks of the chain;
// the last one may be a tail.
func (t *Tier) windowParts(tokens []byte, on func(block int) kvtier.Key) (parts []windowPart) {
	end := len(tokens) / 4
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		for at := max(0, end-w.Size); at < end; {
			number := at / kvtier.BlockTokens
			first := at % kvtier.BlockTokens
			to := min(end, (number+1)*kvtier.BlockTokens)
			parts = append(parts, windowPart{w, kvtier.WindowBlock{
				On: on(number), Child: w.Child, First: first, Position: at, Tokens: tokens[4*at : 4*to : 4*to],
			}})
			at = to
		}
	}
	return parts
}

func (t *Tier) windowLayout(w *Window, n int) *kvtier.Layout {
	key := fmt.Sprintf("%d of window %d", n, w.Child)
	if l, ok := t.layouts.Load(key); ok {
		return l.(*kvtier.Layout)
	}
	l, _ := t.layouts.LoadOrStore(key, kvtier.NewWindowLayout(w.Layers, n))
	return l.(*kvtier.Layout)
}

// planWindows adds the window blocks of a content that has ended, all of whose blocks are planned or stored.
func (l *lineage) planWindows(t *Tier) {
	end := len(l.tokens) / 4
	if !l.finished || l.windowsAt == end || len(t.model.Windows) == 0 {
		return
	}
	on := func(number int) kvtier.Key {
		if number < len(l.keys) {
			return l.keys[number]
		}
		return kvtier.BlockKey(l.parent(t, number), l.tokens[4*number*kvtier.BlockTokens:], nil)
	}
	for _, part := range t.windowParts(l.tokens, on) {
		w := part.block
		l.blocks = append(l.blocks, &block{
			first: w.Position - w.First, rows: w.Rows(), tokens: w.Tokens, key: w.Key(), parent: w.On,
			layout: t.windowLayout(part.window, w.Rows()), part: &part,
		})
	}
	l.windowsAt = end
}

// exportWindow copies a window block's rows out of the cells. They are there until the slot goes on.
func (t *Tier) exportWindow(l *lineage, b *block) {
	if l.closed && !b.parting {
		b.lost = true
		return
	}
	w := b.part.window
	b.cells = w.Rows.Cells(l.slot, b.part.block.Position, b.part.block.Position+b.rows)
	if b.cells == nil {
		b.lost = true
		return
	}
	for i, s := range b.layout.Segments {
		w.Rows.Read(i, b.cells, b.file[s.Offset:s.Offset+s.Bytes])
	}
	b.copied = true
}

// fetchedWindow is a window block in private memory, checked.
type fetchedWindow struct {
	windowPart
	file  *kvtier.File
	data  *kvtier.Block
	cells []int32

	memory *memoryBound
	own    int
}

func (f *fetchedWindow) close() {
	f.file.Close()
	f.memory.give(f.own)
	f.file, f.own = nil, 0
}

// endsContent reports whether the look-up's last block is matched to its end: a window may be stored there.
func endsContent(blocks []*tierpb.BlockInfo, end int) bool {
	for _, b := range blocks {
		if end <= int(b.Rows) {
			return end == int(b.BlockRows)
		}
		end -= int(b.Rows)
	}
	return false
}

// windowBytes is what the windows that end at a position take.
func (t *Tier) windowBytes(end int) (bytes uint64) {
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		bytes += uint64(min(end, w.Size)) * layerBytes(w.Layers)
	}
	return bytes
}

// fetchWindows reads all window blocks of the windows that end where the plan does, and reports whether they are there.
func (t *Tier) fetchWindows(ctx context.Context, f *fetch, plan fetchPlan, chain []kvtier.Key, tokens []byte) bool {
	end := plan.rows
	on := func(number int) kvtier.Key {
		if number < len(chain) && (number+1)*kvtier.BlockTokens <= end {
			return chain[number]
		}
		return kvtier.Key(plan.blocks[len(plan.blocks)-1].Key)
	}
	parts := t.windowParts(tokens[:4*end], on)
	keys := make([]kvtier.Key, len(parts))
	for i, part := range parts {
		keys[i] = part.block.Key()
	}
	ctx, cancel := context.WithTimeout(ctx, t.stats.getTimeout(end, plan.seconds))
	defer cancel()
	release, err := t.client.Get(ctx, t.namespace, keys, getMost, func(r *tierpb.GetResponse) error {
		opened, err := t.openWindow(r, parts[len(f.windows)])
		if err != nil {
			t.reportDamage(keys[len(f.windows)], err)
			return err
		}
		f.windows = append(f.windows, opened)
		f.report.Bytes += uint64(opened.block.Rows()) * layerBytes(opened.window.Layers)
		return nil
	})
	release() // nothing of them is read from the store any more
	return err == nil && len(f.windows) == len(parts)
}

// openWindow reads a window block into memory of its own and checks all of it.
func (t *Tier) openWindow(r *tierpb.GetResponse, part windowPart) (w fetchedWindow, err error) {
	w = fetchedWindow{windowPart: part, memory: &t.memory, own: int(r.FileBytes)}
	if taken := t.memory.take(context.Background(), w.own, 0); taken < w.own {
		t.memory.give(taken)
		return fetchedWindow{}, errMemory
	}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.file, err = kvtier.ReadFile(r.Path, int(r.FileBytes)); err != nil {
		return w, err
	}
	if w.data, err = kvtier.Open(w.file.Data); err != nil {
		return w, err
	}
	w.cells, err = w.data.MatchesWindow(t.namespace, part.block, part.window.Layers, t.model.DType, part.window.Cells)
	if err == nil {
		err = w.data.Verify()
	}
	return w, err
}

// windowsFit reports whether the fetched windows can have the cells they lay in: no other slot, and no batch that is built,
// has one.
func (t *Tier) windowsFit(f *fetch, slot int) bool {
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		if !w.Rows.Free(slot, f.windowCells(w), t.host.AvoidWindow(w.Child)) {
			return false
		}
	}
	return true
}

func (f *fetch) windowCells(w *Window) (cells []int32) {
	for i := range f.windows {
		if f.windows[i].window == w {
			cells = append(cells, f.windows[i].cells...)
		}
	}
	return cells
}

// putWindows gives the slot the fetched windows in place of what it has of them. windowsFit has said that they fit.
func (t *Tier) putWindows(f *fetch, slot int) {
	for i := range t.model.Windows {
		t.model.Windows[i].Rows.Drop(slot, 0)
	}
	for i := range f.windows {
		w := &f.windows[i]
		for segment := range w.data.Header.Segments {
			w.window.Rows.Write(segment, w.cells, rows.Chunk{Data: w.data.Segment(segment)})
		}
		w.window.Rows.Occupy(slot, w.block.Position, w.cells)
	}
}

// windowsHold reports whether the slot has all rows of its windows that end at a position.
func (t *Tier) windowsHold(slot, end int) bool {
	return !slices.ContainsFunc(t.model.Windows, func(w Window) bool {
		return w.Rows.Cells(slot, max(0, end-w.Size), end) == nil
	})
}

func layerBytes(layers []kvtier.Layer) (n uint64) {
	for _, l := range layers {
		n += uint64(l.RowBytes(false) + l.RowBytes(true))
	}
	return n
}
