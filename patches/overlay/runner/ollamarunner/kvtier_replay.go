//go:build kvtier_replay

package ollamarunner

import (
	"fmt"
	"math"
	"os"
	"sync"
	"time"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/model/input"
)

// This build records, with tiering on or off, every change of the cache's metadata and every batch, in order, so that all
// of it can be done again one after the other, without a batch built ahead, a client or a delay: the rows must be the
// same, bit for bit. It also knows of every cell what was computed into it last, and on top of what.
//
// KVTIER_REPLAY_LATE ("20ms") launches every batch so much after the one before has been answered: sequences end and slots
// are given away while it is built and not computed. KVTIER_REPLAY_SLOW makes the computing itself last so much longer,
// and again so long what follows, until tokens are chosen.

// replayEvent is one change: again does it once more, on a cache in the same state.
type replayEvent struct {
	what  string
	again func() error
}

type replayRecord struct {
	mu     sync.Mutex
	server *Server
	cache  kvcache.Cache
	tiered *kvcache.KVTierCache // the same
	rows   *kvcache.KVTierRows
	late   time.Duration
	slow   time.Duration
	events []replayEvent
	open   map[int]*replayBatch // built, not yet computed
	cells  map[int32]replayCell
	report replayReport
}

// replayBatch is a batch that is not yet computed.
type replayBatch struct {
	positions []int32
	sequences []int
	cells     []int32
	inputs    []*input.Input
	tokens    []int32         // of inputs, as they are when the batch is launched
	before    map[int][]int32 // cells of each sequence of the batch, by position, when it was built
}

// replayReport is what the test reads.
type replayReport struct {
	Batches, Rows, Restored, Exported, Discards, Shifts, Forks int

	Pending  int      // discards while a batch with rows of that slot was built and not computed
	Beside   int      // restores while any batch was
	Compared int      // rows that a slot's inputs say are in memory, and that were looked at
	Wrong    []string // what was found, the first few
}

func (r *replayRecord) wrong(format string, args ...any) {
	if len(r.report.Wrong) < 20 {
		r.report.Wrong = append(r.report.Wrong, fmt.Sprintf(format, args...))
	}
}

var replaying replayRecord

func replayAttach(s *Server) {
	tiered, reason := kvcache.KVTierCacheOf(s.cache.cache)
	if reason != "" || len(tiered.Windows()) > 0 {
		return
	}
	r := &replaying
	r.mu.Lock()
	defer r.mu.Unlock()
	r.server, r.cache, r.tiered, r.rows = s, s.cache.cache, tiered, tiered.Rows()
	r.open, r.cells = make(map[int]*replayBatch), make(map[int32]replayCell)
	r.late, _ = time.ParseDuration(os.Getenv("KVTIER_REPLAY_LATE"))
	r.slow, _ = time.ParseDuration(os.Getenv("KVTIER_REPLAY_SLOW"))
}

// recording returns the record, locked, or nil for a model that is not recorded.
func recording() *replayRecord {
	r := &replaying
	r.mu.Lock()
	if r.cache == nil {
		r.mu.Unlock()
		return nil
	}
	return r
}

// replayLate returns a channel that is ready some time after ready is.
func replayLate(ready chan struct{}) chan struct{} {
	if replaying.late == 0 {
		return ready
	}
	late := make(chan struct{}, 1)
	go func() {
		<-ready
		time.Sleep(replaying.late)
		late <- struct{}{}
	}()
	return late
}

func (r *replayRecord) add(what string, again func() error) {
	r.events = append(r.events, replayEvent{what, again})
}

func replayBuilt(id int, batch input.Batch, inputs []*input.Input, outputs []int32) {
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	b := &replayBatch{
		positions: batch.Positions, sequences: batch.Sequences, inputs: inputs,
		cells: r.tiered.BatchCells(), before: make(map[int][]int32),
	}
	last := make(map[int]int32)
	for i, seq := range b.sequences {
		last[seq] = max(last[seq], b.positions[i])
	}
	for seq, pos := range last {
		if b.before[seq] = r.rows.Cells(seq, 0, int(pos)+1); b.before[seq] == nil {
			r.wrong("batch %d: a position of slot %d up to %d is missing or held twice", id, seq, pos)
		}
	}
	r.open[id] = b
	r.report.Batches++
	r.report.Rows += len(b.cells)
	r.add(fmt.Sprintf("batch %d", id), func() error { return r.compute(b, outputs) })
}

// replayBegin is called under Server.mu, after the tokens have been read and before the batch is launched.
func replayBegin(s *Server, id int, seqs []*Sequence) {
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	b := r.open[id]
	for _, in := range b.inputs {
		b.tokens = append(b.tokens, in.Token)
	}
	alive := make(map[int]bool)
	for i, seq := range s.seqs {
		if seq != nil && seqs[i] == seq {
			alive[seq.cache.Id] = true
		}
	}
	r.wrote(id, b, alive)
}

// replaySlow waits, without a lock.
func replaySlow() {
	time.Sleep(replaying.slow)
}

// replayEnd is called without a lock when a batch has been computed, before its tokens are chosen.
func replayEnd(id int) {
	replaySlow()
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	delete(r.open, id)
}

func replayDiscard(slot *InputCacheSlot, keep int32) {
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	r.report.Discards++
	for _, b := range r.open {
		for _, seq := range b.sequences {
			if seq == slot.Id {
				r.report.Pending++
				break
			}
		}
	}
	r.compareTokens("load", slot)
	id := slot.Id
	r.add(fmt.Sprintf("slot %d keeps %d", id, keep), func() error { return r.cache.Remove(id, keep, math.MaxInt32) })
}

func replayFork(src, dst *InputCacheSlot, rows int32) {
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	r.report.Forks++
	from, to := src.Id, dst.Id
	r.add(fmt.Sprintf("slot %d has %d of slot %d", to, rows, from), func() error { r.cache.CopyPrefix(from, to, rows); return nil })
}

// replayShift does again what InputCache.ShiftCacheSlot does, whether it succeeds or not.
func replayShift(slot *InputCacheSlot, keep int32) {
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	r.report.Shifts++
	r.compareTokens("shift", slot)
	id, discard := slot.Id, r.server.cache.ShiftDiscard(slot.Inputs, keep)
	for _, cell := range r.rows.Cells(id, 0, len(slot.Inputs)) {
		c := r.cells[cell]
		c.shifted = true
		r.cells[cell] = c
	}
	r.add(fmt.Sprintf("slot %d shifts %d from %d", id, discard, keep), func() error {
		if r.cache.Remove(id, keep, keep+discard) != nil {
			return r.cache.Remove(id, 0, math.MaxInt32)
		}
		return nil
	})
}

// replayRestored keeps the rows that a restore wrote: they are given, not computed. They begin at from, and take the place of those
// that the slot had up to memory.
func replayRestored(slot *InputCacheSlot, prompt []*input.Input, from, memory, to int32) {
	if to <= from && from == memory {
		return
	}
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	r.report.Restored += int(to - from)
	if len(r.open) > 0 {
		r.report.Beside++
	}
	id := slot.Id
	all := r.rows.Cells(id, 0, int(to))
	cells := all[from:]
	rows := r.rows.Content(cells)
	r.given(all, prompt[:to], int(from))
	r.add(fmt.Sprintf("slot %d restored %d to %d", id, from, to), func() error {
		r.rows.Drop(id, int(from))
		r.rows.SetContent(cells, rows)
		r.rows.Occupy(id, int(from), cells)
		return nil
	})
}

// Exported compares, when everything is done again, the rows of a block with those that the cells then hold. It makes the
// host a tier.Witness.
func (*tierHost) Exported(first int, cells []int32) {
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	r.report.Exported += len(cells)
	for _, batch := range r.open {
		for _, cell := range batch.cells {
			for _, mine := range cells {
				if cell == mine {
					r.wrong("a block at %d was copied while one of its rows was pending", first)
				}
			}
		}
	}
	rows := r.rows.Content(cells)
	r.add(fmt.Sprintf("block at %d", first), func() error {
		for i, row := range r.rows.Content(cells) {
			if string(row) != string(rows[i]) {
				return fmt.Errorf("row %d of the block is not what its batch computes", first+i)
			}
		}
		return nil
	})
}

func replayFinished(seq *Sequence) {
	r := recording()
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	r.compareTokens("end", seq.cache)
}
