package tier

import (
	"cmp"
	"log/slog"
	"time"
)

// restore copies rows [memory, fetch.rows) into free cells of the slot and returns the position to resume from, and what
// kept it from the end of those rows. The caller holds the Host's lock. A row is in the cache afterwards in all layers or in
// none; rows from a damaged block on are not.
func (t *Tier) restore(l *lookUp, slot, memory int) (resume int, cut shortfall) {
	f := l.fetch
	switch {
	case memory < f.from || memory >= f.rows: // memory has shrunk, or grown, since the look-up
		return memory, shortfall{}
	case memory > t.slots[slot].taint:
		// What is in memory is not what the tokens alone would give: stay with it, as stock does.
		return memory, shortfall{reason: shifted}
	}
	start := time.Now()
	defer func() { t.stats.spent(time.Since(start)) }()
	t.host.BeforeRestore()
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
func (t *Tier) StartOver(slot int) (resume int) {
	defer Guard("start over")
	return t.undo(slot, 0)
}

// undo takes away what a restore added, and returns the position to go on from. What there was of windows is gone.
func (t *Tier) undo(slot, memory int) int {
	if len(t.model.Windows) > 0 {
		memory = 0
	}
	for i := range t.model.Windows {
		t.model.Windows[i].Rows.Drop(slot, 0)
	}
	t.rows.Drop(slot, memory)
	if slot < len(t.slots) { // it is called after a panic, too
		for _, l := range t.slots[slot].older {
			l.present = min(l.present, memory)
		}
	}
	return memory
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// rowBytes is the bytes of one position over all layers, K and V.
func (t *Tier) rowBytes() uint64 {
	return layerBytes(t.model.Layers)
}
