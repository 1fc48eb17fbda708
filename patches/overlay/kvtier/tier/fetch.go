package tier

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

const (
	// getMost bounds the wait for files. It is getLeast, and getShare times what the tier expects, and never longer than
	// computing the prompt; what has come by then is used.
	getMost  = 20 * time.Second
	getLeast = time.Second
	getShare = 4
)

var errMemory = errors.New("no memory to read it into")

// fetch is a prompt's stored prefix, in memory or, what the RAM tier has of it, open.
type fetch struct {
	prompt   Prompt
	links    []*link // of its whole blocks, from the prompt's first on, where rows name them
	from     int     // first position of blocks[0]
	rows     int     // positions [from, rows) can be restored
	expected float64 // seconds that the tier was expected to take
	blocks   []*fetchedBlock
	windows  []*fetchedWindow // of a model that has windows: all that end at rows
	report   tierpb.RestoreReport

	release func() // ends the lease
	once    sync.Once
}

func (f *fetch) close() {
	f.once.Do(func() {
		f.release()
		for _, b := range f.blocks {
			b.close()
		}
		for _, w := range f.windows {
			w.close()
		}
	})
}

// fetch opens, or reads and verifies, the planned blocks, several at a time, and sets f.rows to the end of the unbroken run
// of them. The files may take so long. Of those to be read it takes as many, from the first on, as there is memory for. It
// returns what ended the run before that of the plan, unexplained if nothing did.
func (t *Tier) fetch(
	ctx context.Context, timeout time.Duration, f *fetch, wanted fetchPlan, chain []kvtier.Key, tokens []byte,
) tierpb.Shortfall {
	room := t.memory.take(ctx, wanted.ownBytes(), timeout/memoryWaitShare)
	defer func() { t.memory.give(room) }()           // what no block has taken over
	ctx, cancel := context.WithTimeout(ctx, timeout) // the files have all of it, however long the memory was waited for
	defer cancel()
	plan := wanted.within(room)
	if len(plan.blocks) == 0 {
		t.shortOfMemory(wanted.rows, plan.rows)
		return noMemory
	}
	keys := make([]kvtier.Key, len(plan.blocks))
	for i, b := range plan.blocks {
		if len(b.Key) != len(keys[i]) {
			return sidecarError
		}
		copy(keys[i][:], b.Key)
	}
	files := newReaders[*fetchedBlock](t, len(keys))
	start := time.Now()
	release, err := t.client.Get(ctx, t.namespace, keys, getMost, func(r *tierpb.GetResponse) error {
		own := 0
		if r.Tier != tierpb.Tier_TIER_RAM {
			own = int(r.FileBytes)
		}
		if room += t.memory.take(ctx, own-room, 0); own > room { // the block has been moved since the look-up
			return errMemory
		}
		first := plan.from + files.n*kvtier.BlockTokens
		parent := t.namespace
		if first > 0 {
			parent = chain[first/kvtier.BlockTokens-1]
		}
		b := &fetchedBlock{
			key: keys[files.n], first: first, rows: min(kvtier.BlockTokens, plan.rows-first), memory: &t.memory, own: own,
		}
		err := files.begin(ctx, func() (*fetchedBlock, error) {
			return b, t.openBlock(b, r, parent, tokens[4*first:], kvtier.ExtrasOf(f.prompt.Extras, first, b.rows))
		})
		if err == nil {
			room -= own
		}
		return err
	})
	f.release = release
	if err != nil {
		slog.Debug("kv tiering: get", "error", err)
	}
	read := plan
	if errors.Is(err, errMemory) {
		read = plan.first(files.n)
	}
	f.expected = read.seconds
	t.shortOfMemory(wanted.rows, read.rows)
	fetched, failed := files.collect(ctx)
	f.report.FetchSeconds = time.Since(start).Seconds()
	bad := t.keep(f, keys, fetched, failed)
	switch {
	case bad != nil:
		return blockReason(bad)
	case err != nil:
		return callReason(err, filesLate)
	case len(fetched) < len(keys):
		return blocksGone
	case len(plan.blocks) < len(wanted.blocks):
		return noMemory
	}
	return unexplained
}

// keep gives f the unbroken run of fetched blocks, and lets go of the others. It returns what is wrong with the first of
// those.
func (t *Tier) keep(f *fetch, keys []kvtier.Key, fetched []*fetchedBlock, failed []error) (bad error) {
	good := 0
	for good < len(fetched) && failed[good] == nil {
		good++
	}
	if good < len(fetched) {
		bad = failed[good]
		slog.Warn("kv block not usable, recomputing from there", "first", f.from+good*kvtier.BlockTokens, "error", bad)
	}
	for i, b := range fetched {
		t.reportDamage(keys[i], failed[i])
		if i >= good && failed[i] == nil {
			b.close()
		}
	}
	f.blocks = fetched[:good]
	for _, b := range f.blocks {
		f.rows = b.first + b.rows
		f.report.Bytes += uint64(b.rows) * t.rowBytes()
		f.report.VerifySeconds += b.check.Seconds()
	}
	return bad
}

// reportDamage tells the sidecar of a block if it is damaged.
func (t *Tier) reportDamage(key kvtier.Key, err error) {
	if errors.Is(err, kvtier.ErrCorrupt) {
		t.reportUnusable(key, err.Error())
	}
}

// reportUnusable tells the sidecar why a block is of no use; it looks for itself.
func (t *Tier) reportUnusable(key kvtier.Key, why string) {
	t.reports.Add(1)
	go func() {
		defer t.reports.Add(-1)
		_ = t.client.ReportCorrupt(t.namespace, key, why)
	}()
}
