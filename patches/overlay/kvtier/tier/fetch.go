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

// prefetch looks up how much of the prompt is stored, decides whether restoring pays, and maps or reads the blocks.
// It holds no lock while it waits for the sidecar or for a file. nil: nothing to restore.
func (t *Tier) prefetch(ctx context.Context, tokens []int32, inputs int, inMemory func() int) *fetch {
	// The last input is always computed: sampling needs its logits.
	most := min(len(tokens), inputs-1)
	if t.late.Load() > 0 || most < t.config.MinTokens || t.config.Gate == kvtier.GateRecompute || !t.client.Up() {
		return nil
	}
	memory := inMemory()
	if most-memory < t.config.MinTokens {
		return nil
	}
	encoded := kvtier.TokenBytes(tokens)
	start := time.Now()
	chain := kvtier.Chain(t.namespace, encoded)
	has, err := t.client.Has(ctx, t.namespace, chain, encoded, t.stats.lookupTimeout(most-memory))
	if err != nil || len(has.Blocks) == 0 {
		return nil
	}
	plan := planFetch(has.Blocks, memory, most)
	if plan.rows-memory < t.config.MinTokens {
		return nil
	}
	windows := len(t.model.Windows) > 0
	if windows && !endsContent(has.Blocks, plan.rows) {
		return nil
	}
	if !t.stats.restorePays(plan.rows-memory, plan.bytes+t.windowBytes(plan.rows), plan.seconds) {
		return nil
	}
	f := &fetch{from: plan.from, rows: plan.from, release: func() {}}
	f.report.LookupSeconds = time.Since(start).Seconds()
	began := time.Now()
	if !windows || t.fetchWindows(ctx, f, plan, chain, encoded) {
		reading := time.Since(began).Seconds()
		t.fetch(ctx, f, plan, chain, encoded)
		f.report.FetchSeconds += reading
	}
	t.stats.spent(time.Since(start))
	if f.rows-memory < t.config.MinTokens || (windows && f.rows < plan.rows) {
		f.close()
		return nil
	}
	if t.config.Measure {
		f.report.MemcpySeconds, f.report.MemcpyAllSeconds = measureMemcpy(f)
	}
	t.host.Settle()
	return f
}

// fetch maps, or reads and verifies, the planned blocks, several at a time, and sets f.rows to the end of the unbroken run
// of them. Of those to be read it takes as many, from the first on, as there is memory for.
func (t *Tier) fetch(ctx context.Context, f *fetch, wanted fetchPlan, chain []kvtier.Key, tokens []byte) {
	timeout := t.stats.getTimeout(wanted.rows-wanted.from, wanted.seconds)
	room := t.memory.take(ctx, wanted.ownBytes(), timeout/memoryWaitShare)
	defer func() { t.memory.give(room) }()           // what no block has taken over
	ctx, cancel := context.WithTimeout(ctx, timeout) // the files have all of it, however long the memory was waited for
	defer cancel()
	plan := wanted.within(room)
	if len(plan.blocks) == 0 {
		t.shortOfMemory(wanted.rows, plan.rows)
		return
	}
	keys := make([]kvtier.Key, len(plan.blocks))
	for i, b := range plan.blocks {
		if len(b.Key) != len(keys[i]) {
			return
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
			err := t.openBlock(&b, r, parent, tokens[4*first:])
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
	t.keep(f, fetched, failed)
}

// keep gives f the unbroken run of fetched blocks, and lets go of the others.
func (t *Tier) keep(f *fetch, fetched []fetchedBlock, failed []error) {
	good := 0
	for good < len(fetched) && failed[good] == nil {
		good++
	}
	if good < len(fetched) {
		slog.Warn("kv block not usable, recomputing from there", "first", f.from+good*kvtier.BlockTokens, "error", failed[good])
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
		select {
		case o := <-opened:
			fetched[o.i], failed[o.i] = o.block, o.err
		case <-ctx.Done():
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
	}
	return fetched, failed
}
