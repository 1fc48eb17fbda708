package tier

import (
	"context"
	"errors"
	"log/slog"
	"math"
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

// windowPart is one block of a window.
type windowPart struct {
	window *Window
	block  kvtier.WindowBlock
}

// windowParts are the blocks of a window that ends at the end of tokens, in order, without cells. on names the blocks of the
// chain; the last one may be a tail.
func windowParts(w *Window, tokens []byte, on func(block int) kvtier.Key) (parts []windowPart) {
	end := len(tokens) / 4
	for at := max(0, end-w.Size); at < end; {
		number := at / kvtier.BlockTokens
		to := min(end, (number+1)*kvtier.BlockTokens)
		parts = append(parts, windowPart{w, kvtier.WindowBlock{
			On: on(number), Child: w.Child, First: at % kvtier.BlockTokens, Position: at,
			Tokens: tokens[4*at : 4*to : 4*to], Last: to == end,
		}})
		at = to
	}
	return parts
}

func (t *Tier) windowLayout(part windowPart) *kvtier.Layout {
	n, others := part.block.Rows(), len(part.block.Others)
	key := [3]int{part.window.Child, n, others}
	if l, ok := t.layouts.Load(key); ok {
		return l.(*kvtier.Layout)
	}
	l, _ := t.layouts.LoadOrStore(key, kvtier.NewWindowLayout(part.window.Layers, n, others))
	return l.(*kvtier.Layout)
}

// planWindows adds the window blocks of a content that has ended, all of whose blocks are planned or stored. The caller holds
// the Host's lock.
func (l *lineage) planWindows(t *Tier) {
	end := len(l.tokens) / 4
	if !l.finished || l.windowsAt == end {
		return
	}
	l.windowsAt = end
	on := func(number int) kvtier.Key {
		if number < len(l.keys) {
			return l.keys[number]
		}
		return l.key(t, number*kvtier.BlockTokens, end-number*kvtier.BlockTokens)
	}
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		from := max(0, end-w.Size)
		cells := w.Rows.Cells(l.slot, from, end)
		if cells == nil {
			continue
		}
		var keys []kvtier.Key
		for _, part := range windowParts(w, l.tokens, on) {
			at := part.block.Position - from
			part.block.Cells = cells[at : at+part.block.Rows()]
			if part.block.Last {
				part.block.Others = keys
			}
			key := part.block.Key()
			keys = append(keys, key)
			l.blocks = append(l.blocks, &block{
				first: part.block.Position - part.block.First, rows: part.block.Rows(), tokens: part.block.Tokens,
				key: key, parent: part.block.On, layout: t.windowLayout(part), part: &part,
			})
		}
	}
}

// exportWindow copies a window block's rows out of the cells. They are there until the slot goes on.
func (t *Tier) exportWindow(l *lineage, b *block) {
	w, rows := b.part.window, b.part.block
	cells := w.Rows.Cells(l.slot, rows.Position, rows.Position+b.rows)
	if l.present != math.MaxInt || !slices.Equal(cells, rows.Cells) { // the slot has gone on
		b.lost = true
		return
	}
	for i, s := range b.layout.Segments {
		w.Rows.Read(i, cells, b.file[s.Offset:s.Offset+s.Bytes])
	}
	b.copied = true
}

// fetchedWindow is a window block in private memory, checked.
type fetchedWindow struct {
	windowPart
	file *kvtier.File
	data *kvtier.Block

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

// fetchWindows reads the windows that end where the plan does, and says why not all of them are there; unexplained: they are.
func (t *Tier) fetchWindows(ctx context.Context, f *fetch, plan fetchPlan, chain []kvtier.Key, tokens []byte) tierpb.Shortfall {
	ctx, cancel := context.WithTimeout(ctx, t.stats.getTimeout(plan.rows, plan.seconds))
	defer cancel()
	on := func(number int) kvtier.Key {
		if number < len(chain) && (number+1)*kvtier.BlockTokens <= plan.rows {
			return chain[number]
		}
		return kvtier.Key(plan.blocks[len(plan.blocks)-1].Key)
	}
	for i := range t.model.Windows {
		parts := windowParts(&t.model.Windows[i], tokens[:4*plan.rows], on)
		before, last := parts[:len(parts)-1], parts[len(parts)-1:]
		found, cut := t.getWindow(ctx, last, []kvtier.Key{last[0].block.Key()})
		f.windows = append(f.windows, found...)
		switch {
		case cut != unexplained:
			return cut
		case len(found[0].block.Others) != len(before):
			return unreadable
		}
		if len(before) > 0 {
			found, cut = t.getWindow(ctx, before, found[0].block.Others)
			f.windows = append(f.windows, found...)
			if cut != unexplained {
				return cut
			}
		}
	}
	for i := range f.windows {
		f.report.Bytes += uint64(f.windows[i].block.Rows()) * layerBytes(f.windows[i].window.Layers)
	}
	return unexplained
}

// getWindow reads window blocks by their keys, up to the first that can't be used, and says why it can't.
func (t *Tier) getWindow(ctx context.Context, parts []windowPart, keys []kvtier.Key) (found []fetchedWindow, cut tierpb.Shortfall) {
	var bad error
	release, err := t.client.Get(ctx, t.namespace, keys, getMost, func(r *tierpb.GetResponse) error {
		n := len(found)
		opened, err := t.openWindow(r, parts[n], keys[n])
		if err != nil {
			t.reportDamage(keys[n], err)
			bad = err
			return err
		}
		found = append(found, opened)
		return nil
	})
	release() // nothing of them is read from the store any more
	if err != nil {
		slog.Debug("kv tiering: get window", "error", err)
	}
	switch {
	case errors.Is(bad, errMemory):
		return found, noMemory
	case bad != nil:
		return found, blockReason(bad)
	case err != nil:
		return found, callReason(err, filesLate)
	case len(found) < len(keys):
		return found, windowMissing
	}
	return found, unexplained
}

// openWindow reads a window block into memory of its own and checks all of it.
func (t *Tier) openWindow(r *tierpb.GetResponse, part windowPart, key kvtier.Key) (w fetchedWindow, err error) {
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
	w.block, err = w.data.WindowOf(t.namespace, part.block, key, part.window.Layers, t.model.DType, part.window.Cells)
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
			cells = append(cells, f.windows[i].block.Cells...)
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
			w.window.Rows.Write(segment, w.block.Cells, rows.Chunk{Data: w.data.Segment(segment)})
		}
		w.window.Rows.Occupy(slot, w.block.Position, w.block.Cells)
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
