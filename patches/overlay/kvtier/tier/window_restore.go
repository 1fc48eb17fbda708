package tier

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"time"

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

// lastWindows returns the last position from least to end at which all windows are stored, going by what the sidecar says of the
// blocks, and how long it expects reading them to take. 0: there is none. tokens are the prompt's.
func (t *Tier) lastWindows(p Prompt, blocks []*tierpb.BlockInfo, tokens []byte, least, end int) (at int, seconds float64) {
	for number := (end - 1) / kvtier.BlockTokens; number >= 0 && (number+1)*kvtier.BlockTokens >= least; number-- {
		if len(blocks[number].Attached) == 0 || len(blocks[number].Key) != len(kvtier.Key{}) {
			continue
		}
		first := number * kvtier.BlockTokens
		for at := min(end, first+kvtier.BlockTokens); at > first; at-- {
			if seconds, ok := t.windowsAt(blocks[number], tokens[:4*at]); ok && p.resumable(at) == at {
				return at, seconds
			}
		}
	}
	return 0, 0
}

// windowShortfall is why a prompt that is stored up to matched is gone on with from end at most.
func (t *Tier) windowShortfall(matched, end int) shortfall {
	if slices.ContainsFunc(t.model.Windows, func(w Window) bool { return w.Checkpoints != nil }) {
		return shortfall{stateMissing, end}
	}
	return shortfall{windowMissing, matched}
}

// windowsAt reports whether all windows that end at the end of tokens hang on the block which that is in.
func (t *Tier) windowsAt(b *tierpb.BlockInfo, tokens []byte) (seconds float64, ok bool) {
	on := func(int) kvtier.Key { return kvtier.Key(b.Key) }
	end := len(tokens) / 4
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		last := w.part(tokens, max(end-w.Size, wholeRows(end-1), 0), on).block
		key := last.Key()
		found := slices.IndexFunc(b.Attached, func(a *tierpb.AttachedBlock) bool { return bytes.Equal(a.Key, key[:]) })
		if found < 0 {
			return 0, false
		}
		// The others are known when the last is read; they lie where it does, as a rule.
		rows := min(end, w.Size)
		seconds += b.Attached[found].ExpectedSeconds * float64(rows) / float64(last.Rows())
	}
	return seconds, true
}

// windowBytes is what the windows that end at a position take.
func (t *Tier) windowBytes(end int) (bytes uint64) {
	for i := range t.model.Windows {
		w := &t.model.Windows[i]
		bytes += uint64(min(end, w.Size)) * layerBytes(w.Layers)
	}
	return bytes
}

// fetchWindows reads the windows that end where the plan does, for which it may take so long, and says why not all of them are
// there; unexplained: they are.
func (t *Tier) fetchWindows(
	ctx context.Context, timeout time.Duration, f *fetch, plan fetchPlan, chain []kvtier.Key, tokens []byte,
) tierpb.Shortfall {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	on := func(number int) kvtier.Key {
		if number < len(chain) && (number+1)*kvtier.BlockTokens <= plan.rows {
			return chain[number]
		}
		return kvtier.Key(plan.blocks[len(plan.blocks)-1].Key)
	}
	var last []windowPart // of each window: the block that names those before it
	var lastKeys []kvtier.Key
	before := make([][]windowPart, len(t.model.Windows))
	for i := range t.model.Windows {
		parts := windowParts(&t.model.Windows[i], tokens[:4*plan.rows], on)
		before[i] = parts[:len(parts)-1]
		last = append(last, parts[len(parts)-1])
		lastKeys = append(lastKeys, last[i].block.Key())
	}
	if _, cut := t.getWindows(ctx, f, last, lastKeys); cut != unexplained {
		return cut
	}
	var keys, ends []kvtier.Key // ends[n] is the end of the window that keys[n] is of
	for i, w := range f.windows {
		if len(w.block.Others) != len(before[i]) {
			return unreadable
		}
		keys = append(keys, w.block.Others...)
		ends = append(ends, slices.Repeat(lastKeys[i:i+1], len(w.block.Others))...)
	}
	if len(keys) > 0 {
		there, cut := t.getWindows(ctx, f, slices.Concat(before...), keys)
		if cut == windowMissing { // while its end is there nobody stores it anew
			t.reportUnusable(ends[there], "a block that it names is gone")
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

// getWindows adds window blocks to f, several read at a time, and says how many of them, from the first on, are there, and why
// not all are; unexplained: they are.
func (t *Tier) getWindows(
	ctx context.Context, f *fetch, parts []windowPart, keys []kvtier.Key,
) (there int, cut tierpb.Shortfall) {
	files := newReaders[*fetchedWindow](t, len(keys))
	release, err := t.client.Get(ctx, t.namespace, keys, getMost, func(r *tierpb.GetResponse) error {
		n := files.n
		return files.begin(ctx, func() (*fetchedWindow, error) { return t.openWindow(r, parts[n], keys[n]) })
	})
	found, failed := files.collect(ctx)
	release() // nothing of them is read from the store any more
	if err != nil {
		slog.Debug("kv tiering: get window", "error", err)
	}
	var bad error
	for i, w := range found {
		t.reportDamage(keys[i], failed[i])
		if failed[i] == nil {
			f.windows = append(f.windows, w)
		} else if bad == nil {
			bad = failed[i]
		}
	}
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
func (t *Tier) openWindow(r *tierpb.GetResponse, part windowPart, key kvtier.Key) (w *fetchedWindow, err error) {
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
func (t *Tier) putWindows(f *fetch, slot int) {
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
func (t *Tier) windowsHold(slot, end int) bool {
	return !slices.ContainsFunc(t.model.Windows, func(w Window) bool {
		return w.Rows.Cells(slot, max(0, end-w.Size), end) == nil
	})
}
