package ollamarunner

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

const (
	tierHoldBytes    = 64 << 20  // copied per hold of Server.mu
	tierReserveBytes = 256 << 20 // reserved, mapped and committed at a time
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

// snapshotGuarded turns a memory fault, as when a disk fills up under a mapped file, into an error.
func (t *kvTier) snapshotGuarded(l *tierLineage) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
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
	defer func() {
		t.server.mu.Lock()
		defer t.server.mu.Unlock()
		for _, b := range blocks {
			// The discard hook must not copy into a file that is committed or gone.
			if !b.copied {
				b.lost = true
			}
			b.file = nil
			b.mapped.Close()
		}
	}()
	var fill []*tierBlock
	ready := 0 // blocks, from the first on, that are present or reserved
reserved:
	for ; ready < len(blocks); ready++ {
		b, r := blocks[ready], reservations[ready]
		switch r.Outcome {
		case tierpb.Reservation_OUTCOME_RESERVED:
			b.id = r.Id
			if b.mapped, err = kvtier.MapForWrite(r.Path, b.layout.FileBytes); err != nil {
				break reserved
			}
			fill = append(fill, b)
		case tierpb.Reservation_OUTCOME_PRESENT:
		default:
			slog.Debug("kv snapshot ends early", "outcome", r.Outcome, "first", b.first)
			break reserved
		}
	}
	t.fill(l, fill)
	committed, sealErr := t.seal(session, fill)
	for done < ready && (blocks[done].mapped == nil || slices.Contains(committed, blocks[done])) {
		done++
	}
	return done, errors.Join(err, sealErr)
}

// fill copies blocks out of the cells into their files, a bounded number of bytes per hold of the lock.
func (t *kvTier) fill(l *tierLineage, blocks []*tierBlock) {
	for len(blocks) > 0 {
		blocks = t.fillSome(l, blocks)
	}
}

// fillSome holds the lock once and returns the blocks that are still to be copied.
func (t *kvTier) fillSome(l *tierLineage, blocks []*tierBlock) []*tierBlock {
	t.server.mu.Lock()
	defer t.server.mu.Unlock()
	if activeTier.Load() != t { // it has failed: nobody says any more what becomes of the rows
		for _, b := range blocks {
			b.lost = b.lost || !b.copied
		}
		return nil
	}
	if !t.onHost {
		t.quiesce()
	}
	bytes := 0
	for i, b := range blocks {
		if bytes >= tierHoldBytes {
			return blocks[i:]
		}
		if b.copied || b.lost {
			continue // the discard hook was first
		}
		b.file = b.mapped.Data
		t.export(l, b)
		bytes += b.layout.FileBytes
	}
	return nil
}

// seal writes the headers of the blocks that were copied, commits them, and returns those that are stored.
func (t *kvTier) seal(session *kvtier.PutSession, blocks []*tierBlock) (stored []*tierBlock, err error) {
	var ids []uint64
	for _, b := range blocks {
		if !b.copied {
			break // a chain has no holes
		}
		data := b.mapped.Data
		if &b.file[0] != &data[0] {
			copy(data[b.layout.PayloadOffset:], b.file[b.layout.PayloadOffset:])
		}
		if err := b.layout.Seal(data, t.namespace, b.key, b.parent, b.first, b.tokens, t.dtype); err != nil {
			return nil, err
		}
		ids = append(ids, b.id)
	}
	if len(ids) == 0 {
		return nil, nil
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
