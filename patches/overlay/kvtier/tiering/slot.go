package tiering

import (
	"encoding/binary"
	"log/slog"
	"math"
	"slices"

	"github.com/ollama/ollama/kvtier"
)

const (
	// catchUpBytes bounds what is copied, under the lock, of content that is about to be lost, and the memory of all
	// such copies that are not stored yet. There is less for them where little memory is left.
	catchUpBytes = 256 << 20

	// progressTokens is how many new rows of a request in progress are worth a snapshot of their own, if it has also
	// been computing for as long as the configuration says: a long prefill is kept when the runner is killed. What takes
	// less waits for the end of the request, since storing beside computing takes cores from it.
	progressTokens = 512

	// noTaint is the taint of a slot all of whose rows are exact.
	noTaint = math.MaxInt
)

// slot is what the tiering knows of a slot of the runner's cache. Guarded by the Host's lock.
type slot struct {
	id      int
	lineage *lineage   // the content now
	older   []*lineage // earlier contents that still have blocks to be copied from rows that the slot kept
	kept    []*link    // the blocks that the slot kept whole of an earlier content, or that came from the store

	// taint is the first position whose K/V is no longer what its tokens alone would give: a context shift turns K in
	// place and keeps V that attended to tokens since discarded. Nothing from there on is ever published.
	taint int

	computed int // rows that have been computed once the batch now being launched is
	memory   int // of the current request: rows found in the slot, rows after restoring, tokens of the prompt
	resumed  int
	prompt   int

	short shortfall // why no more of the current request's prompt came back

	// beside counts the rows, of every sequence, that are computed between the current request's load and its first token.
	beside int
}

func newSlot(id int) slot {
	return slot{id: id, taint: noTaint, lineage: newLineage(id)}
}

// note records that a prompt is in the slot, exact up to the taint, and computed once the batches in after are.
func (ts *slot) note(p Prompt, after []int) {
	l := ts.lineage
	rows := min(len(p.Tokens), ts.taint)
	if have := len(l.tokens) / 4; rows < have {
		// A stop string was cut off the end. The blocks already planned stay true: they name the tokens they hold.
		l.tokens = l.tokens[: 4*rows : 4*rows]
		l.chain, l.end = l.chain[:min(len(l.chain), rows/kvtier.BlockTokens)], nil
		l.saved = min(l.saved, wholeRows(rows))
	}
	for _, token := range p.Tokens[len(l.tokens)/4 : rows] {
		l.tokens = binary.LittleEndian.AppendUint32(l.tokens, uint32(token))
	}
	l.extras = kvtier.ExtrasOf(p.Extras, 0, rows)
	l.after = after
}

// batched is called when a batch of so many rows is about to be launched, before launched.
func (ts *slot) batched(rows int) {
	if ts.computed < ts.prompt {
		ts.beside += rows
	}
}

// launched is called when a batch is about to be launched, with the rows that the slot holds then: those of the time before
// are computed once what is being computed now is. It returns how many of them are worth a snapshot in progress, or 0.
func (ts *slot) launched(t *Tiering, held int) (worth int) {
	computed := ts.computed
	ts.computed = held
	// On a device, a batch without outputs may still be running when it counts as computed: wait for the request's end.
	if t.config.Snapshot && t.model.OnHost && ts.lineage.progressDue(t, computed) && computed <= held && t.client.Up() {
		ts.lineage.progressed(computed)
		return computed
	}
	return 0
}

// load starts a new lineage after a request has been given the slot: rows up to resumed are in the cells.
func (ts *slot) load(memory, resumed, prompt int) {
	if memory <= ts.taint {
		ts.taint = noTaint // what a restore added is exact
	}
	if resumed > memory {
		ts.lineage.saved = wholeRows(resumed) // they came from the store
	}
	ts.lineage.progressed(resumed)
	ts.computed, ts.memory, ts.resumed, ts.prompt = resumed, memory, resumed, prompt
}

// discard is called before the slot keeps only its first rows: blocks that would lose rows are copied into memory, as
// far as the bound allows, and a new lineage begins. The caller holds the Host's lock.
func (ts *slot) discard(t *Tiering, keep int) {
	current := ts.lineage
	current.finished = true
	if t.up() && !current.refused {
		current.plan(t)
	}
	current.closed = true
	ts.kept = slices.Clip(ts.links(keep))
	ts.lineage = newLineage(ts.id)
	ts.computed = 0

	ts.older = append(ts.older, current)
	ts.keepOnly(t, keep)
}

// keepOnly is called before the slot keeps only its first rows: what earlier contents still have to store of the others is copied.
func (ts *slot) keepOnly(t *Tiering, keep int) {
	ts.older = slices.DeleteFunc(ts.older, func(l *lineage) bool { return len(l.blocks) == 0 })
	budget := t.copyRoom()
	for _, l := range ts.older {
		if l.atRisk(keep) {
			if t.model.OnHost {
				t.host.Wait(l.after)
			} else {
				t.host.Quiesce()
			}
			budget = t.catchUp(l, keep, budget)
		}
		l.present = min(l.present, keep)
		t.work.add(l)
	}
}

// copyRoom is how many bytes more may be copied to be stored later.
func (t *Tiering) copyRoom() int {
	return min(catchUpBytes-t.held(), t.memory.free())
}

// held is the memory of copies that still wait to be stored.
func (t *Tiering) held() (bytes int) {
	for i := range t.slots {
		bytes += t.slots[i].lineage.promptEnd.held()
		for _, l := range append([]*lineage{t.slots[i].lineage}, t.slots[i].older...) {
			for _, b := range l.blocks {
				if b.copied {
					bytes += len(b.payload)
				}
			}
		}
	}
	return bytes
}

// catchUp copies the blocks that lose rows, in order, until the bound is reached; a chain has no holes, so the rest is
// lost. It returns what is left of the bound.
func (t *Tiering) catchUp(l *lineage, keep int, budget int) int {
	for i, b := range l.blocks {
		if !b.losesRows(keep) {
			continue
		}
		if budget < b.layout.Bytes {
			slog.Info("kv tiering: content discarded before it was stored", "slot", l.slot, "from", b.first, "blocks", len(l.blocks)-i)
			for _, b := range l.blocks[i:] {
				b.lost = b.lost || b.losesRows(keep)
			}
			return 0
		}
		if b.payload == nil {
			budget -= b.layout.Bytes
			b.payload = make([]byte, b.layout.Bytes)
		}
		t.export(l, b)
	}
	return budget
}

// fork makes the slot inherit the first rows of another.
func (ts *slot) fork(src *slot, rows int) {
	ts.taint = noTaint
	if src.taint < rows {
		ts.taint = src.taint
	}
	ts.kept = slices.Clone(src.links(rows))
}
