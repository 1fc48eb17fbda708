package tier

import (
	"context"
	"errors"
	"log/slog"
	"slices"
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

	// readers is the least number of blocks read and checked at a time, whatever the number of cores: a disk wants more
	// than one request to work on.
	readers = 4
)

var (
	errLate   = errors.New("not read in time")
	errMemory = errors.New("no memory to read it into")
)

// fetch is a prompt's stored prefix, in memory.
type fetch struct {
	prompt   Prompt
	from     int     // first position of blocks[0]
	rows     int     // positions [from, rows) can be restored
	expected float64 // seconds that the tier was expected to take
	blocks   []fetchedBlock
	windows  []fetchedWindow // of a model that has windows: all that end at rows
	report   tierpb.RestoreReport

	release func() // ends the lease
	once    sync.Once
}

func (f *fetch) close() {
	f.once.Do(func() {
		f.release()
		for i := range f.blocks {
			f.blocks[i].close()
		}
		for i := range f.windows {
			f.windows[i].close()
		}
	})
}

// fetch maps, or reads and verifies, the planned blocks, several at a time, and sets f.rows to the end of the unbroken run
// of them. Of those to be read it takes as many, from the first on, as there is memory for. It returns what ended the run
// before that of the plan, unexplained if nothing did.
func (t *Tier) fetch(ctx context.Context, f *fetch, wanted fetchPlan, chain []kvtier.Key, tokens []byte) tierpb.Shortfall {
	timeout := t.stats.getTimeout(wanted.rows-wanted.from, wanted.seconds)
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
	opened := make(chan outcome, len(keys))
	slots := make(chan struct{}, max(readers, workerCount()))
	n := 0
	start := time.Now()
	release, err := t.client.Get(ctx, t.namespace, keys, getMost, func(r *tierpb.GetResponse) error {
		own := 0
		if r.Tier != tierpb.Tier_TIER_RAM {
			own = int(r.FileBytes)
		}
		if room += t.memory.take(ctx, own-room, 0); own > room { // the block has been moved since the look-up
			return errMemory
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		room -= own
		i := n
		n++
		go func() {
			first := plan.from + i*kvtier.BlockTokens
			parent := t.namespace
			if first > 0 {
				parent = chain[first/kvtier.BlockTokens-1]
			}
			b := fetchedBlock{
				key: keys[i], first: first, rows: min(kvtier.BlockTokens, plan.rows-first), memory: &t.memory, own: own,
			}
			err := t.openBlock(&b, r, parent, tokens[4*first:], kvtier.ExtrasOf(f.prompt.Extras, first, b.rows))
			<-slots
			opened <- outcome{i, b, err}
		}()
		return nil
	})
	f.release = release
	if err != nil {
		slog.Debug("kv tiering: get", "error", err)
	}
	read := plan
	if errors.Is(err, errMemory) {
		read = plan.first(n)
	}
	f.expected = read.seconds
	t.shortOfMemory(wanted.rows, read.rows)
	fetched, failed := t.collect(ctx, opened, n)
	f.report.FetchSeconds = time.Since(start).Seconds()
	bad := t.keep(f, fetched, failed)
	switch {
	case bad != nil:
		return blockReason(bad)
	case err != nil:
		return callReason(err, filesLate)
	case n < len(keys):
		return blocksGone
	case len(plan.blocks) < len(wanted.blocks):
		return noMemory
	}
	return unexplained
}

// keep gives f the unbroken run of fetched blocks, and lets go of the others. It returns what is wrong with the first of
// those.
func (t *Tier) keep(f *fetch, fetched []fetchedBlock, failed []error) (bad error) {
	good := 0
	for good < len(fetched) && failed[good] == nil {
		good++
	}
	if good < len(fetched) {
		bad = failed[good]
		slog.Warn("kv block not usable, recomputing from there", "first", f.from+good*kvtier.BlockTokens, "error", bad)
	}
	for i := range fetched {
		t.reportDamage(fetched[i].key, failed[i])
		if i >= good {
			fetched[i].close()
		}
	}
	f.blocks = fetched[:good]
	for i := range f.blocks {
		f.rows = f.blocks[i].first + f.blocks[i].rows
		f.report.Bytes += uint64(f.blocks[i].rows) * t.rowBytes()
		f.report.VerifySeconds += f.blocks[i].check.Seconds()
	}
	return bad
}

// reportDamage tells the sidecar of a block if it is damaged.
func (t *Tier) reportDamage(key kvtier.Key, err error) {
	if errors.Is(err, kvtier.ErrCorrupt) {
		t.reports.Add(1)
		go func() {
			defer t.reports.Add(-1)
			_ = t.client.ReportCorrupt(t.namespace, key, err.Error())
		}()
	}
}

// outcome is what became of the block with number i.
type outcome struct {
	i     int
	block fetchedBlock
	err   error
}

// collect waits for n blocks, but not beyond the context's end: a read that hangs in the kernel must not hold the request.
// What comes later is closed in the background; until then nothing else is fetched.
func (t *Tier) collect(ctx context.Context, opened <-chan outcome, n int) ([]fetchedBlock, []error) {
	fetched := make([]fetchedBlock, n)
	failed := slices.Repeat([]error{errLate}, n)
	for got := range n {
		o, ok := next(ctx, opened)
		if !ok {
			t.late.Add(1)
			go func() {
				defer t.late.Add(-1)
				for range n - got {
					late := <-opened
					late.block.close()
				}
			}()
			return fetched, failed
		}
		fetched[o.i], failed[o.i] = o.block, o.err
	}
	return fetched, failed
}

// next waits for a block until the context's end. What has come by then is used, also when it is looked at later.
func next(ctx context.Context, opened <-chan outcome) (o outcome, ok bool) {
	select {
	case o = <-opened:
		return o, true
	default:
	}
	select {
	case o = <-opened:
		return o, true
	case <-ctx.Done():
		return o, false
	}
}
