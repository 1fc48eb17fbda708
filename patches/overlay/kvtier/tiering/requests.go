package tiering

import (
	"context"
	"log/slog"
	"time"
)

// The turns of a request's life, in their order. A runner calls them of Active(), under a Guard.

// flushTimeout bounds a flush, whoever waits for it.
const flushTimeout = 10 * time.Second

// Prefetch looks a prompt up and has what should be restored in memory before the runner's lock is taken. request is any
// value that Restore is called with later; p is its inputs, of which there are so many, up to the first that can't be told from
// others; inMemory says which slot holds most of the first inputs, and how many, to avoid needless reading. What nobody has restored
// when ctx ends is let go of.
func (t *Tiering) Prefetch(ctx context.Context, request any, p Prompt, inputs int, inMemory func() (slot, rows int)) {
	t.lookUps.add(request, t.prefetch(ctx, p, inputs, inMemory))
	// The request's context ends with its handler, whichever way it returns.
	context.AfterFunc(ctx, func() { t.lookUps.take(request).close() })
}

// BeforeDiscard saves what a slot is about to lose: everything from position keep on. The caller holds the lock.
func (t *Tiering) BeforeDiscard(slot, keep int) {
	t.slots[slot].discard(t, keep)
}

// Restore copies the rows that were prefetched for a request into the slot it was given and returns the position to resume
// from: memory, the rows found in the slot, or more. prompt is the number of its tokens. request is nil when nothing may be
// restored. The caller holds the lock. After a panic the slot is as it was, and the tiering is off.
func (t *Tiering) Restore(slot int, request any, memory, prompt int) (resume int) {
	l := t.lookUps.take(request)
	defer func() {
		if r := recover(); r != nil {
			fail("restore", r)
			resume = t.undo(slot, memory)
		}
	}()
	resume, cut := memory, shortfall{}
	if l != nil && l.fetch != nil {
		defer func() { go l.close() }() // giving gigabytes back takes time, and nobody needs to wait for it
		memory, resume, cut = t.restore(l, slot, memory)
	}
	t.slots[slot].load(memory, resume, prompt)
	t.slots[slot].short = l.explain(resume, prompt, cut)
	t.slots[slot].beside = t.host.Ahead()
	return resume
}

// Kept is how many rows the last restore of a slot left where they were. The caller holds the lock.
func (t *Tiering) Kept(slot int) int { return t.slots[slot].memory }

// BeforeFork saves what dst is about to lose, and lets dst inherit from src's first rows. The caller holds the lock.
func (t *Tiering) BeforeFork(src, dst, rows int) {
	t.slots[dst].discard(t, 0)
	t.slots[dst].fork(&t.slots[src], rows)
}

// BeforeShift saves what is still exact of a slot; after the shift only the first keep positions are. It holds p, or, where
// that is nil, what it was last said to hold. The caller holds the lock.
func (t *Tiering) BeforeShift(slot int, p *Prompt, keep int) {
	t.host.Quiesce()
	t.written++
	ts := &t.slots[slot]
	if p != nil {
		ts.note(*p, nil)
	}
	// Not keep: when the shift turns out not to be possible, stock empties the slot and computes all of it again, in other
	// cells.
	ts.discard(t, 0)
	ts.taint = min(ts.taint, keep)
}

// Doubt says that what is computed for a slot from position from on may be other rows than its tokens alone would give:
// nothing of it is ever stored. The caller holds the lock.
func (t *Tiering) Doubt(slot, from int) {
	t.slots[slot].taint = min(t.slots[slot].taint, from)
}

// BeforeLaunch is called when a batch is about to be launched, after which the slot will hold held rows. What was launched before
// is complete, but for what a device still does. The caller holds the lock, and is ready to let go of it and to launch the batch:
// the lock may be let go of, and taken again.
func (t *Tiering) BeforeLaunch(slot, held int) {
	t.slots[slot].beforeLaunch(t, held)
}

// Launched is called when a batch of so many rows, of every sequence in it, is about to be launched, after which the slot
// holds held rows. It returns how many tokens of the slot are worth a snapshot while the request goes on, for Progress, or 0.
// The caller holds the lock.
func (t *Tiering) Launched(slot, held, batch int) (worth int) {
	t.written++
	ts := &t.slots[slot]
	ts.batched(batch)
	return ts.launched(t, held)
}

// Progress queues a snapshot of as many of the slot's first inputs as Launched said, or of those before the first that can't be
// told from others; their rows are complete when the batches in after are. The caller holds the lock.
func (t *Tiering) Progress(slot int, p Prompt, after []int) {
	ts := &t.slots[slot]
	ts.note(p, after)
	t.work.add(ts.lineage)
}

// Finished queues the snapshot of a sequence that has ended and counts it. p is the slot's inputs, those before the first that
// can't be told from others; prefill is how long computing the prompt took. The caller holds the lock.
func (t *Tiering) Finished(slot int, p Prompt, prefill time.Duration) {
	ts := &t.slots[slot]
	if len(t.host.Running()) == 0 {
		ts.keepPromptEnd(t, false) // of an answer of one token; in one hold of the lock, for the caller has more to do under it
	} else {
		ts.dropPromptEnd() // ended while its last batch is computed, for want of context: its rows are not there yet
	}
	ts.note(p, t.host.Running())
	ts.lineage.finished = true
	t.work.add(ts.lineage) // before it is counted: see report
	t.stats.request(ts, prefill)
}

// Flush returns when what the slots hold has been stored, or when ctx ends.
func (t *Tiering) Flush(ctx context.Context) {
	timeout := flushTimeout
	if !t.sound.Load() {
		timeout = flushUnknown // a large file takes longer, and nobody shall wait for that
	}
	stored := make(chan struct{})
	go func() {
		t.Drain()
		t.stats.report(t)
		close(stored)
	}()
	select {
	case <-stored:
	case <-ctx.Done():
		slog.Warn("kv tiering: model unloaded before its snapshot was complete")
	case <-time.After(timeout):
	}
}

// Drain waits until everything that was queued has been stored or given up.
func (t *Tiering) Drain() { t.work.drain() }
