package tiering

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// holdBytes are copied per hold of the Host's lock, but at least a block; little enough to stay in the CPU's cache. Tests have less.
var holdBytes = 8 << 20

const (
	reserveBytes = 256 << 20 // reserved and committed at a time
	putTimeout   = 30 * time.Second
	reportWait   = 2 * time.Second
)

// errOlder: the sidecar knows no blocks that their rows name, which has been said.
var errOlder = errors.New("the sidecar is older than this program")

// snapshotLoop stores what is queued. It is the only goroutine that reserves and commits.
func (t *Tiering) snapshotLoop() {
	for {
		l := t.work.take()
		if active.Load() != t {
			t.work.done()
			continue
		}
		if err := t.snapshotGuarded(l); err != nil && !errors.Is(err, kvtier.ErrDown) && !errors.Is(err, errUnchecked) && !errors.Is(err, errOlder) {
			slog.Warn("kv snapshot skipped", "slot", l.slot, "error", err)
		}
		t.work.done() // before the report, which says how many are left
		t.stats.report(t)
	}
}

// snapshotGuarded turns a panic into an error: without tiering the runner goes on.
func (t *Tiering) snapshotGuarded(l *lineage) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
			t.host.Lock()
			defer t.host.Unlock()
			l.blocks, l.saved, l.tail, l.windowsAt = nil, 0, 0, 0
		}
	}()
	return t.snapshot(l)
}

// planned returns what is to be stored of a lineage now, and the batches that must have been computed before.
func (t *Tiering) planned(l *lineage) (blocks []*block, after []int) {
	t.host.Lock()
	defer t.host.Unlock() // also after a panic: whoever recovers takes the lock again
	l.plan(t)
	return slices.Clone(l.blocks), l.after
}

// snapshot stores the blocks of a lineage that are not stored yet.
func (t *Tiering) snapshot(l *lineage) error {
	blocks, after := t.planned(l)
	if len(blocks) == 0 {
		return nil
	}
	done, err := t.store(l, blocks, after)
	t.host.Lock()
	defer t.host.Unlock()
	l.blocks = slices.DeleteFunc(l.blocks, func(b *block) bool { return slices.Contains(blocks, b) })
	if done < len(blocks) {
		// The next snapshot of this content starts again from the first that is not stored.
		l.saved = min(l.saved, wholeRows(blocks[done].first))
		l.tail, l.windowsAt = 0, 0
		l.refused = l.finished
	}
	return err
}

// store writes blocks in order and returns how many of them, from the first on, the store has.
func (t *Tiering) store(l *lineage, blocks []*block, after []int) (done int, err error) {
	t.host.Wait(after)
	for done < len(blocks) {
		n, bytes := 0, 0
		for done+n < len(blocks) && (n == 0 || bytes+blocks[done+n].layout.Bytes <= reserveBytes) {
			bytes += blocks[done+n].layout.Bytes
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
func (t *Tiering) storeSome(l *lineage, blocks []*block) (done int, err error) {
	if t.older() {
		return 0, errOlder
	}
	if err := t.checkContent(contentWait); err != nil {
		return 0, err
	}
	// A block that was found damaged counts as present until the store has heard of it.
	for deadline := time.Now().Add(reportWait); t.reports.Load() > 0 && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
	}
	session, err := t.client.Put(t.putOpen(), putTimeout)
	if err != nil {
		return 0, err
	}
	defer session.Close()
	defer t.forget(blocks)
	for done < len(blocks) {
		known := t.makeNameable(l, blocks[done:])
		if known == 0 {
			return done, nil
		}
		text, n := t.textOf(blocks[done : done+known])
		stored, err := t.putSome(session, l, text, blocks[done:done+n])
		if done += stored; err != nil || stored < n {
			return done, err
		}
	}
	return done, nil
}

// makeNameable returns how many blocks, from the first on, can be named. Those that their rows name are copied if none can: as many as
// are copied at once.
func (t *Tiering) makeNameable(l *lineage, blocks []*block) (n int) {
	if n = t.nameable(blocks); n > 0 {
		return n
	}
	blocks = blocks[:t.copyOut(l, blocks)] // no more: others would be copied to where these lie
	for _, b := range blocks {
		if !b.copied {
			break // a chain has no holes
		}
		if b.part == nil {
			b.crcs = b.layout.Checksums(b.payload)
		}
	}
	return t.nameable(blocks)
}

// nameable returns how many blocks, from the first on, can be named.
func (t *Tiering) nameable(blocks []*block) (n int) {
	t.host.Lock()
	defer t.host.Unlock()
	for n < len(blocks) {
		b := blocks[n]
		if b.crcs != nil && b.part == nil && b.link.fingerprint == nil {
			b.link.fingerprint = kvtier.FingerprintOf(b.crcs)
		}
		if !b.link.known(t) {
			break
		}
		n++
	}
	return n
}

// putSome reserves, fills and commits blocks of a text and returns how many of them, from the first on, the store has.
func (t *Tiering) putSome(session *kvtier.PutSession, l *lineage, text *tierpb.PutText, blocks []*block) (done int, err error) {
	reservations, err := session.Reserve(text)
	if err != nil {
		return 0, err
	}
	defer t.forget(blocks)
	var fill []*block
	ready := 0 // blocks, from the first on, that are present or reserved
reserved:
	for ; ready < len(blocks); ready++ {
		b, r := blocks[ready], reservations[ready]
		switch r.Outcome {
		case tierpb.Reservation_OUTCOME_RESERVED:
			t.refused.Store(false)
			if r.FileBytes != r.PayloadOffset+uint64(b.layout.Bytes) {
				return 0, fmt.Errorf("the sidecar reserved %d bytes for %d, from %d on", r.FileBytes, b.layout.Bytes, r.PayloadOffset)
			}
			b.file = r
			fill = append(fill, b)
		case tierpb.Reservation_OUTCOME_PRESENT:
		default:
			slog.Debug("kv snapshot ends early", "outcome", r.Outcome, "first", b.first)
			t.sayRefused(r.Reason)
			break reserved
		}
	}
	committed, err := t.fill(session, l, fill)
	for done < ready && (blocks[done].file == nil || slices.Contains(committed, blocks[done])) {
		done++
	}
	return done, err
}

// sayRefused logs once that a rule of the sidecar's settings keeps this model out: that lasts until they change.
func (t *Tiering) sayRefused(reason string) {
	t.refused.Store(reason != "")
	if reason != "" && reason != t.refusal {
		t.refusal = reason
		slog.Info("kv tiering: nothing of this model is stored", "reason", reason)
	}
}

// fill copies blocks out of the cells into their files, commits them, and returns those that are stored.
func (t *Tiering) fill(session *kvtier.PutSession, l *lineage, blocks []*block) ([]*block, error) {
	for at := 0; at < len(blocks); {
		n := t.copyOut(l, blocks[at:])
		// The pages of a file on tmpfs are this process's memory, too, until it is removed.
		if bytes := payloadBytes(blocks[at : at+n]); bytes > t.memory.free() {
			slog.Info("kv tiering: content not stored for want of memory", "slot", l.slot, "from", blocks[at].first, "bytes", bytes)
			return t.commit(session, blocks[:at])
		}
		for _, b := range blocks[at : at+n] {
			if !b.copied { // a chain has no holes
				return t.commit(session, blocks[:slices.Index(blocks, b)])
			}
			if b.crcs == nil {
				b.crcs = b.layout.Checksums(b.payload)
			}
			if err := kvtier.WriteFile(string(b.file.Path), int(b.file.FileBytes), int(b.file.PayloadOffset), b.payload); err != nil {
				return nil, err
			}
		}
		t.forget(blocks[at : at+n])
		at += n
	}
	return t.commit(session, blocks)
}

func payloadBytes(blocks []*block) (n int) {
	for _, b := range blocks {
		n += b.layout.Bytes
	}
	return n
}

// copyOut holds the lock once, copies the first blocks out of the cells and returns how many that were.
func (t *Tiering) copyOut(l *lineage, blocks []*block) int {
	t.host.Lock()
	defer t.host.Unlock()
	if active.Load() != t { // it has failed: nobody says any more what becomes of the rows
		for _, b := range blocks {
			b.lost = b.lost || !b.copied
		}
		return len(blocks)
	}
	if !t.model.OnHost {
		t.host.Quiesce()
	}
	memory := t.staging[:cap(t.staging)]
	for i, b := range blocks {
		if b.copied || b.lost {
			continue // the discard hook was first
		}
		size := b.layout.Bytes
		if i == 0 && size > len(memory) {
			t.staging = make([]byte, max(size, holdBytes))
			memory = t.staging
		}
		if size > len(memory) {
			return i
		}
		b.payload, memory = memory[:size:size], memory[size:]
		t.export(l, b)
	}
	return len(blocks)
}

// forget lets go of the memory of blocks; those that were not copied never will be.
func (t *Tiering) forget(blocks []*block) {
	t.host.Lock()
	defer t.host.Unlock()
	for _, b := range blocks {
		b.lost = b.lost || !b.copied
		b.payload = nil
	}
}

// commit makes filled files blocks of the store and returns those that it took.
func (t *Tiering) commit(session *kvtier.PutSession, blocks []*block) (stored []*block, err error) {
	if len(blocks) == 0 {
		return nil, nil
	}
	ids, crcs := make([]uint64, len(blocks)), make([][]uint32, len(blocks))
	for i, b := range blocks {
		ids[i], crcs[i] = b.file.Id, b.crcs
	}
	results, err := session.Commit(ids, crcs)
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
