package ollamarunner

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/ml"
	"github.com/ollama/ollama/model/input"
)

// tierInputsReady returns what must be over before the tokens of the batch that is built now are read: ready, or, with
// tiering on, the answer of the last batch that was launched where stock has lost sight of it.
//
// When nothing can be added to a batch, stock builds none, and the one after it waits for nobody. That is so when the only
// sequence is to be shifted and can't be, because it shares cells with another slot: all of it is computed again at once,
// and the newest token is still being computed. Stock then computes token 0 in its place.
func tierInputsReady(last batchState, ready chan struct{}) chan struct{} {
	if tiering.Active() != nil && last.ctx == nil && last.inputsReadyCh != nil {
		ready = last.inputsReadyCh
	}
	return replayLate(ready)
}

// tierBuilt notes the cells of a batch whose graph has been built: from now on until it has been computed, they may be
// written although the cache's metadata may call them free.
func tierBuilt(ctx ml.Context, id int, batch input.Batch, inputs []*input.Input, outputs []int32) {
	replayBuilt(id, batch, inputs, outputs)
	if t := tiering.Active(); t != nil {
		defer tiering.Guard("built")
		h := engineHost.Load()
		h.order.built(t, ctx)
		h.batches.built(id, h.cache.BatchCells())
		for _, w := range h.windows {
			h.batches.builtWindow(id, w.Child, w.BatchCells())
		}
		if h.states > 0 {
			h.batches.builtWindow(id, h.states, []int32{0}) // it writes the states, whatever its rows
		}
		// Such a row is another when something else comes after it in its batch.
		for _, i := range h.cache.Unmasked() {
			t.Doubt(batch.Sequences[i], int(batch.Positions[tierBegin(batch, inputs, i)]))
		}
	}
}

// tierComputeBegin is called under Server.mu when a batch is about to be launched. Everything launched before it, except
// device work of batches without outputs, is complete. It may let go of Server.mu and take it again: its caller lets go of it next,
// and nothing is built, shifted or removed meanwhile, for forwardBatch waits until this batch has been launched.
func tierComputeBegin(s *Server, id int, seqs []*Sequence) {
	tierBeforeLaunch(s, seqs)
	replayBegin(s, id, seqs)
	t := tiering.Active()
	if t == nil {
		return
	}
	defer tiering.Guard("begin")
	h := engineHost.Load()
	batches := &h.batches
	after := batches.running()
	rows := batches.begin(id)
	for i, seq := range s.seqs {
		if seq != nil && seqs[i] == seq {
			if n := t.Launched(seq.cache.Id, len(seq.cache.Inputs), rows); n > 0 {
				t.Progress(seq.cache.Id, tierPrompt(h, seq.cache.Inputs[:n], seq.mmStore), after)
			}
		}
	}
}

// tierBeforeLaunch may let go of Server.mu: what others do then, they do before the batch.
func tierBeforeLaunch(s *Server, seqs []*Sequence) {
	t := tiering.Active()
	if t == nil {
		return
	}
	defer tiering.Guard("launch")
	for i, seq := range s.seqs {
		if seq != nil && seqs[i] == seq {
			t.BeforeLaunch(seq.cache.Id, len(seq.cache.Inputs))
		}
	}
}

// tierComputeEnd is called without a lock when a batch has been computed.
func tierComputeEnd(id int) {
	replayEnd(id)
	defer replaySlow()
	if h := engineHost.Load(); h != nil {
		defer tiering.Guard("end")
		defer h.batches.end(id)
		if t := tiering.Active(); t != nil {
			h.order.computed(t)
		}
	}
}

// tierBatches knows which batches are built but not computed, and which are being computed.
//
// The runner builds a batch, and marks its cells in the cache's metadata, while the one before is still being computed.
// When a sequence ends, the batch after its last one is already built: its cells are freed by the next request, and
// written later. A restore must not use them.
type tierBatches struct {
	mu      sync.Mutex
	cond    *sync.Cond
	cells   map[int][]int32         // built, not yet computed
	windows map[int]map[int][]int32 // the same of caches that drop rows, by batch and by child
	started map[int]struct{}        // being computed
}

func (b *tierBatches) init() {
	b.cond = sync.NewCond(&b.mu)
	b.cells = make(map[int][]int32)
	b.windows = make(map[int]map[int][]int32)
	b.started = make(map[int]struct{})
}

func (b *tierBatches) built(id int, cells []int32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cells[id] = cells
}

func (b *tierBatches) builtWindow(id, child int, cells []int32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.windows[id] == nil {
		b.windows[id] = make(map[int][]int32)
	}
	b.windows[id][child] = cells
}

// begin returns how many rows the batch computes.
func (b *tierBatches) begin(id int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.started[id] = struct{}{}
	return len(b.cells[id])
}

// rows is how many rows the batches compute that are built and not yet computed.
func (b *tierBatches) rows() (rows int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, cells := range b.cells {
		rows += len(cells)
	}
	return rows
}

func (b *tierBatches) end(id int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.cells, id)
	delete(b.windows, id)
	delete(b.started, id)
	b.cond.Broadcast()
}

// running returns the batches that are being computed.
func (b *tierBatches) running() []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Keys(b.started))
}

// wait returns when none of ids is being computed.
func (b *tierBatches) wait(ids []int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for slices.ContainsFunc(ids, func(id int) bool { _, ok := b.started[id]; return ok }) {
		b.cond.Wait()
	}
}

func (b *tierBatches) waitNoneRunning() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.started) > 0 {
		b.cond.Wait()
	}
}

// awaitBuilt waits until the batches that are built now have been computed, at most for the given time. It does not wait for
// those that other sequences go on to build; pending says which cells of theirs to avoid.
func (b *tierBatches) awaitBuilt(timeout time.Duration) {
	deadline := time.Now().Add(timeout) // before the timer starts: when it fires, the deadline has passed
	timer := time.AfterFunc(timeout, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.cond.Broadcast()
	})
	defer timer.Stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	ids := slices.Collect(maps.Keys(b.cells))
	open := func(id int) bool { _, ok := b.cells[id]; return ok }
	for slices.ContainsFunc(ids, open) && time.Now().Before(deadline) {
		b.cond.Wait()
	}
}

// pending returns the cells that batches still to be computed will write.
func (b *tierBatches) pending() map[int32]struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	cells := make(map[int32]struct{})
	for _, c := range b.cells {
		for _, cell := range c {
			cells[cell] = struct{}{}
		}
	}
	return cells
}

// pendingWindow is pending for a cache that drops rows.
func (b *tierBatches) pendingWindow(child int) map[int32]struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	cells := make(map[int32]struct{})
	for _, children := range b.windows {
		for _, cell := range children[child] {
			cells[cell] = struct{}{}
		}
	}
	return cells
}
