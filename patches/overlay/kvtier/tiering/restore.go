package tiering

import (
	"cmp"
	"log/slog"
	"time"

	"github.com/ollama/ollama/kvtier"
)

// restore gives the slot what the fetch has beyond the rows that it holds, and returns how many of those stayed, the position to
// resume from, and what kept it from the end of the fetch. The caller holds the Host's lock.
func (t *Tiering) restore(l *lookUp, slot, memory int) (kept, resume int, cut shortfall) {
	f, ts := l.fetch, &t.slots[slot]
	switch {
	case memory < f.from || memory >= f.rows: // memory has shrunk, or grown, since the look-up
		return memory, memory, shortfall{}
	case memory > ts.taint:
		// What is in memory is not what the tokens alone would give: stay with it, as stock does.
		return memory, memory, shortfall{reason: shifted}
	case !t.model.ByRows:
		resume, cut = t.restoreFrom(l, slot, memory)
		return min(memory, resume), resume, cut
	case !ts.begins(f.links[:f.from/kvtier.BlockTokens]):
		return memory, memory, shortfall{reason: memoryGone}
	}
	// Rows of two histories are not joined: those of the last block that are in memory may be another's.
	t.host.BeforeRestore()
	ts.keepOnly(t, f.from)
	ts.kept = ts.kept[:f.from/kvtier.BlockTokens]
	t.rows.Drop(slot, f.from)
	if resume, cut = t.restoreFrom(l, slot, f.from); resume <= f.from {
		resume = t.undo(slot, resume)
		return resume, resume, cut
	}
	ts.kept = f.links[: resume/kvtier.BlockTokens : resume/kvtier.BlockTokens]
	return f.from, resume, cut
}

// restoreFrom copies rows [memory, fetch.rows) into free cells of the slot and returns the position to resume from, and what
// kept it from the end of those rows. A row is in the cache afterwards in all layers or in none; rows from a damaged block on are
// not.
func (t *Tiering) restoreFrom(l *lookUp, slot, memory int) (resume int, cut shortfall) {
	f := l.fetch
	t.host.BeforeRestore() // that a device computes for others is no part of what a restore takes
	start := time.Now()
	defer func() { t.stats.spent(time.Since(start)) }()
	cells := t.rows.Find(slot, memory, f.rows-memory, t.host.Avoid())
	if len(cells) < f.rows-memory {
		cut.reason = noCells
		cells = cells[:f.whole(memory, len(cells))]
	}
	if len(cells) < t.config.MinTokens { // or memory has grown, so that little is left
		return memory, cmp.Or(cut, l.short, shortfall{reason: tooShort})
	}
	if !t.placeWindows(f, slot) {
		return memory, shortfall{reason: noCells}
	}
	copying := time.Now()
	rows, bad, err := t.copyIn(f, memory, cells)
	if err != nil {
		slog.Warn("kv restore failed, recomputing", "error", err)
		return memory, shortfall{reason: bad}
	}
	if rows < len(cells) {
		cut.reason = bad
		rows = f.whole(memory, rows)
		cells = cells[:rows]
		f.report.Bytes = uint64(rows) * t.rowBytes()
	}
	if rows < t.config.MinTokens || (len(f.windows) > 0 && memory+rows < f.rows) {
		return memory, cut
	}
	t.putWindows(f, slot)
	f.report.CopySeconds = time.Since(copying).Seconds()
	t.rows.Occupy(slot, memory, cells)
	resume = memory + len(cells)
	if t.rows.Cells(slot, 0, resume) == nil || !t.windowsHold(slot, resume) {
		slog.Error("kv restore left a gap, recomputing", "slot", slot, "from", memory, "to", resume)
		return t.undo(slot, memory), shortfall{reason: restoreFailed}
	}
	f.report.Tokens = uint64(len(cells))
	t.stats.restored(f)
	slog.Info("kv restored", "slot", slot, "from", memory, "tokens", len(cells), "bytes", f.report.Bytes,
		"fetch", seconds(f.report.FetchSeconds), "copy", seconds(f.report.CopySeconds), "locked", time.Since(start))
	return resume, cut
}

// whole is how many of so many rows from a position on may be restored: up to where a runner may go on.
func (f *fetch) whole(from, rows int) int {
	return max(0, f.prompt.resumable(from+rows)-from)
}

// StartOver takes everything away that a slot holds, and returns the position to go on from. The caller holds the lock.
func (t *Tiering) StartOver(slot int) (resume int) {
	defer Guard("start over")
	return t.undo(slot, 0)
}

// undo takes away what a restore added, and returns the position to go on from. What there was of windows is gone.
func (t *Tiering) undo(slot, memory int) int {
	if len(t.model.Windows) > 0 {
		memory = 0
	}
	for i := range t.model.Windows {
		t.model.Windows[i].Rows.Drop(slot, 0)
	}
	t.rows.Drop(slot, memory)
	if slot < len(t.slots) { // it is called after a panic, too
		ts := &t.slots[slot]
		ts.kept = ts.kept[:min(len(ts.kept), memory/kvtier.BlockTokens)]
		for _, l := range ts.older {
			l.present = min(l.present, memory)
		}
	}
	return memory
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// rowBytes is the bytes of one position over all layers, K and V.
func (t *Tiering) rowBytes() uint64 {
	return layerBytes(t.model.Layers)
}
