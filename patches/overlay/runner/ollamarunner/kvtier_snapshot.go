package ollamarunner

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

const (
	tierHoldBytes    = 8 << 20   // copied per hold of Server.mu, but at least a block; little enough to stay in the CPU's cache
	tierReserveBytes = 256 << 20 // reserved and committed at a time
	tierPutTimeout   = 30 * time.Second
	tierReportWait   = 2 * time.Second
)

// tierQueue holds the lineages that have something to store, each at most once.
type tierQueue struct {
	mu      sync.Mutex
	cond    *sync.Cond
	waiting []*tierLineage
	active  bool
}

func newTierQueue() *tierQueue {
	q := &tierQueue{}
	q.cond = sync.NewCond(&q.mu)
	return q
}

func (q *tierQueue) add(l *tierLineage) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !slices.Contains(q.waiting, l) {
		q.waiting = append(q.waiting, l)
		q.cond.Broadcast()
	}
}

// take returns the next lineage; the one taken before counts as done.
func (q *tierQueue) take() *tierLineage {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.active = false
	q.cond.Broadcast()
	for len(q.waiting) == 0 {
		q.cond.Wait()
	}
	l := q.waiting[0]
	q.waiting = slices.Delete(q.waiting, 0, 1)
	q.active = true
	return l
}

// drain waits until everything that was queued has been stored or given up.
func (q *tierQueue) drain() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.active || len(q.waiting) > 0 {
		q.cond.Wait()
	}
}

// snapshotLoop stores what is queued. It is the only goroutine that reserves and commits.
func (t *kvTier) snapshotLoop() {
	for {
		l := t.work.take()
		if activeTier.Load() != t {
			continue
		}
		if err := t.snapshotGuarded(l); err != nil && !errors.Is(err, kvtier.ErrDown) {
			slog.Warn("kv snapshot skipped", "slot", l.slot, "error", err)
		}
		t.stats.report(t)
	}
}

// snapshotGuarded turns a panic into an error: without tiering the runner goes on.
func (t *kvTier) snapshotGuarded(l *tierLineage) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
			t.server.mu.Lock()
			defer t.server.mu.Unlock()
			l.blocks, l.saved, l.tail = nil, 0, 0
		}
	}()
	return t.snapshot(l)
}

// snapshot stores the blocks of a lineage that are not stored yet.
func (t *kvTier) snapshot(l *tierLineage) error {
	t.server.mu.Lock()
	l.plan(t)
	blocks, after := slices.Clone(l.blocks), l.after
	t.server.mu.Unlock()
	if len(blocks) == 0 {
		return nil
	}
	done, err := t.store(l, blocks, after)
	t.server.mu.Lock()
	defer t.server.mu.Unlock()
	l.blocks = slices.DeleteFunc(l.blocks, func(b *tierBlock) bool { return slices.Contains(blocks, b) })
	if done < len(blocks) {
		// The next snapshot of this content starts again from the first that is not stored.
		l.saved = min(l.saved, wholeRows(blocks[done].first))
		l.tail = 0
		l.refused = l.finished
	}
	return err
}

// store writes blocks in order and returns how many of them, from the first on, the store has.
func (t *kvTier) store(l *tierLineage, blocks []*tierBlock, after []int) (done int, err error) {
	t.batches.wait(after)
	for done < len(blocks) {
		n, bytes := 0, 0
		for done+n < len(blocks) && (n == 0 || bytes+blocks[done+n].layout.FileBytes <= tierReserveBytes) {
			bytes += blocks[done+n].layout.FileBytes
			n++
		}
		stored, err := t.storeSome(l, blocks[done:done+n])
		done += stored
		if err != nil || stored < n {
			return done, err
		}
	}
	return done, nil
}

// storeSome reserves, fills and commits a few blocks and returns how many of them, from the first on, the store has.
func (t *kvTier) storeSome(l *tierLineage, blocks []*tierBlock) (done int, err error) {
	// A block that was found damaged counts as present until the store has heard of it.
	for deadline := time.Now().Add(tierReportWait); t.reports.Load() > 0 && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
	}
	session, err := t.client.Put(t.namespace, t.description, tierPutTimeout)
	if err != nil {
		return 0, err
	}
	defer session.Close()
	claims := make([]*tierpb.BlockClaim, len(blocks))
	for i, b := range blocks {
		claims[i] = &tierpb.BlockClaim{Key: b.key[:], Parent: b.parent[:], FileBytes: uint64(b.layout.FileBytes), Tail: b.rows < kvtier.BlockTokens}
	}
	reservations, err := session.Reserve(claims)
	if err != nil {
		return 0, err
	}
	defer t.forget(blocks)
	var fill []*tierBlock
	ready := 0 // blocks, from the first on, that are present or reserved
reserved:
	for ; ready < len(blocks); ready++ {
		b, r := blocks[ready], reservations[ready]
		switch r.Outcome {
		case tierpb.Reservation_OUTCOME_RESERVED:
			b.id, b.path = r.Id, r.Path
			fill = append(fill, b)
		case tierpb.Reservation_OUTCOME_PRESENT:
		default:
			slog.Debug("kv snapshot ends early", "outcome", r.Outcome, "first", b.first)
			t.sayRefused(r.Reason)
			break reserved
		}
	}
	committed, err := t.fill(session, l, fill)
	for done < ready && (blocks[done].path == "" || slices.Contains(committed, blocks[done])) {
		done++
	}
	return done, err
}

// sayRefused logs once that a rule of the sidecar's settings keeps this model out: that lasts until they change.
func (t *kvTier) sayRefused(reason string) {
	if reason != "" && reason != t.refusal {
		t.refusal = reason
		slog.Info("kv tiering: nothing of this model is stored", "reason", reason)
	}
}

// fill copies blocks out of the cells into their files, commits them, and returns those that are stored.
func (t *kvTier) fill(session *kvtier.PutSession, l *tierLineage, blocks []*tierBlock) ([]*tierBlock, error) {
	for at := 0; at < len(blocks); {
		n := t.copyOut(l, blocks[at:])
		for _, b := range blocks[at : at+n] {
			if !b.copied { // a chain has no holes
				return t.commit(session, blocks[:slices.Index(blocks, b)])
			}
			err := b.layout.Seal(b.file, t.namespace, b.key, b.parent, b.first, b.tokens, t.dtype)
			if err == nil {
				err = kvtier.WriteFile(b.path, b.file)
			}
			if err != nil {
				return nil, err
			}
		}
		t.forget(blocks[at : at+n])
		at += n
	}
	return t.commit(session, blocks)
}

// copyOut holds the lock once, copies the first blocks out of the cells and returns how many that were.
func (t *kvTier) copyOut(l *tierLineage, blocks []*tierBlock) int {
	t.server.mu.Lock()
	defer t.server.mu.Unlock()
	if activeTier.Load() != t { // it has failed: nobody says any more what becomes of the rows
		for _, b := range blocks {
			b.lost = b.lost || !b.copied
		}
		return len(blocks)
	}
	if !t.onHost {
		t.quiesce()
	}
	memory := t.staging[:cap(t.staging)]
	for i, b := range blocks {
		if b.copied || b.lost {
			continue // the discard hook was first
		}
		size := b.layout.FileBytes
		if i == 0 && size > len(memory) {
			t.staging = make([]byte, max(size, tierHoldBytes))
			memory = t.staging
		}
		if size > len(memory) {
			return i
		}
		b.file, memory = memory[:size:size], memory[size:]
		t.export(l, b)
	}
	return len(blocks)
}

// forget lets go of the memory of blocks; those that were not copied never will be.
func (t *kvTier) forget(blocks []*tierBlock) {
	t.server.mu.Lock()
	defer t.server.mu.Unlock()
	for _, b := range blocks {
		b.lost = b.lost || !b.copied
		b.file = nil
	}
}

// commit makes filled files blocks of the store and returns those that it took.
func (t *kvTier) commit(session *kvtier.PutSession, blocks []*tierBlock) (stored []*tierBlock, err error) {
	if len(blocks) == 0 {
		return nil, nil
	}
	ids := make([]uint64, len(blocks))
	for i, b := range blocks {
		ids[i] = b.id
	}
	results, err := session.Commit(ids)
	if err != nil {
		return nil, err
	}
	for i, r := range results {
		if !r.Stored {
			slog.Warn("kv block not stored", "first", blocks[i].first, "reason", r.Reason)
			continue
		}
		stored = append(stored, blocks[i])
	}
	t.stats.stored(len(stored))
	return stored, nil
}
