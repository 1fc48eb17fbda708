package tiering

import (
	"context"
	"log/slog"
	"slices"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

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

// addWindow begins to read the last block of a window, which names those before it.
func (in *incoming) addWindow(file *tierpb.NamedFile, key kvtier.Key) error {
	t, n := in.f.t, in.windows.n
	if n == 0 {
		for i := range t.model.Windows {
			parts := in.parts(i)
			in.ends = append(in.ends, parts[len(parts)-1])
		}
	}
	if n >= len(in.ends) || in.ends[n].block.Key() != key {
		return errAnswer
	}
	part := in.ends[n]
	return in.windows.begin(in.ctx, func() (*fetchedWindow, error) { return t.openWindow(file, part, key) })
}

// parts are the blocks of a window that ends where the plan does.
func (in *incoming) parts(window int) []windowPart {
	return windowParts(&in.f.t.model.Windows[window], in.f.tokens[:4*in.plan.EndRow], in.key)
}

// endWindows waits for the last blocks of the windows, reads the others, and says why not all of them are there; unexplained: they
// are. Without them the rows are of no use.
func (in *incoming) endWindows() (cut tierpb.Shortfall) {
	f := in.f
	if len(f.t.model.Windows) == 0 {
		return unexplained
	}
	defer func() {
		if cut != unexplained {
			f.rows = f.from
		}
	}()
	found, failed := in.windows.collect(in.ctx) // in any case: they hold memory
	var ends []kvtier.Key
	for i := range found {
		ends = append(ends, in.ends[i].block.Key())
	}
	switch bad := f.takeWindows(ends, found, failed); {
	case bad != nil:
		return blockReason(bad)
	case len(found) < len(f.t.model.Windows):
		return windowMissing
	case f.rows < int(in.plan.EndRow):
		return unexplained // of no use
	}
	return in.otherWindows(ends)
}

// otherWindows reads the blocks of the windows before the last ones, which name them.
func (in *incoming) otherWindows(ends []kvtier.Key) tierpb.Shortfall {
	f := in.f
	var parts []windowPart
	var keys, of []kvtier.Key // of[n] is the end of the window that keys[n] is of
	for i, w := range f.windows {
		before := in.parts(i)
		before = before[:len(before)-1]
		if len(w.block.Others) != len(before) {
			return unreadable
		}
		parts, keys = append(parts, before...), append(keys, w.block.Others...)
		of = append(of, slices.Repeat(ends[i:i+1], len(before))...)
	}
	if len(keys) > 0 {
		there, cut := f.t.getWindows(in.ctx, f, parts, keys)
		if cut == windowMissing { // while its end is there nobody stores it anew
			f.t.reportUnusable(of[there], "a block that it names is gone")
		}
		if cut != unexplained {
			return cut
		}
	}
	for _, w := range f.windows {
		f.report.Bytes += uint64(w.block.Rows()) * layerBytes(w.window.Layers)
	}
	return unexplained
}

// takeWindows adds those that could be read, and returns what is wrong with the first of the others.
func (f *fetch) takeWindows(keys []kvtier.Key, found []*fetchedWindow, failed []error) (bad error) {
	for i, w := range found {
		f.t.reportDamage(keys[i], failed[i])
		if failed[i] == nil {
			f.windows = append(f.windows, w)
		} else if bad == nil {
			bad = failed[i]
		}
	}
	return bad
}

// getWindows adds window blocks to f, several read at a time, and says how many of them, from the first on, are there, and why
// not all are; unexplained: they are.
func (t *Tiering) getWindows(
	ctx context.Context, f *fetch, parts []windowPart, keys []kvtier.Key,
) (there int, cut tierpb.Shortfall) {
	files := newReaders[*fetchedWindow](t, len(keys))
	release, err := t.client.Get(ctx, t.namespace, keys, getMost, func(r *tierpb.GetResponse) error {
		n, file := files.n, &tierpb.NamedFile{Tier: r.Tier, Path: r.Path, FileBytes: r.FileBytes}
		return files.begin(ctx, func() (*fetchedWindow, error) { return t.openWindow(file, parts[n], keys[n]) })
	})
	found, failed := files.collect(ctx)
	release() // nothing of them is read from the store any more
	if err != nil {
		slog.Debug("kv tiering: get window", "error", err)
	}
	bad := f.takeWindows(keys, found, failed)
	switch {
	case bad != nil:
		return len(found), blockReason(bad)
	case err != nil:
		return len(found), callReason(err, filesLate)
	case len(found) < len(keys):
		return len(found), windowMissing
	}
	return len(found), unexplained
}

// openWindow reads a window block into memory of its own and checks all of it.
func (t *Tiering) openWindow(r *tierpb.NamedFile, part windowPart, key kvtier.Key) (w *fetchedWindow, err error) {
	if !t.memory.takeAll(int(r.FileBytes)) {
		return nil, errMemory
	}
	w = &fetchedWindow{windowPart: part, memory: &t.memory, own: int(r.FileBytes)}
	usable := false
	defer func() {
		if !usable { // a panic, too
			w.close()
		}
	}()
	if w.file, err = t.files.read(string(r.Path), int(r.FileBytes)); err != nil {
		return w, err
	}
	if w.data, err = w.file.Block(); err != nil {
		return w, err
	}
	w.block, err = w.data.WindowOf(t.namespace, part.block, key, part.window.Layers, part.window.DType, part.window.named())
	if err == nil {
		err = w.data.Verify()
	}
	usable = err == nil
	return w, err
}

// putWindows gives the slot the fetched windows in place of what it has of them. placeWindows has said where.
func (t *Tiering) putWindows(f *fetch, slot int) {
	t.written++
	for i := range t.model.Windows {
		t.model.Windows[i].Rows.Drop(slot, 0)
	}
	for _, w := range f.windows {
		for segment := range w.data.Header.Segments {
			w.window.Rows.Write(segment, w.cells, rows.Chunk{Data: w.data.Segment(segment)})
		}
		w.window.Rows.Occupy(slot, w.block.Position, w.cells)
	}
}

// windowsHold reports whether the slot has all rows of its windows that end at a position.
func (t *Tiering) windowsHold(slot, end int) bool {
	return !slices.ContainsFunc(t.model.Windows, func(w Window) bool {
		return w.Rows.Cells(slot, max(0, end-w.Size), end) == nil
	})
}
