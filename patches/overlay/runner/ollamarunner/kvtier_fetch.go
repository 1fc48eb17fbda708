package ollamarunner

import (
	"context"
	"errors"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
	"github.com/ollama/ollama/model/input"
)

const (
	// tierSettleWait bounds the wait for the batches that are built when a restore is about to happen: with a long
	// prompt of another request, one may take seconds.
	tierSettleWait = 500 * time.Millisecond

	// tierGetTimeout bounds the wait for files. It is tierGetLeast, and tierGetShare of the time that the tier expects, and
	// never longer than computing the prompt; what has come by then is used.
	tierGetTimeout = 20 * time.Second
	tierGetLeast   = time.Second
	tierGetShare   = 4

	// tierReaders is the least number of blocks read and checked at a time, whatever the number of cores: a disk wants more
	// than one request to work on.
	tierReaders = 4
)

var (
	errTierLate   = errors.New("not read in time")
	errTierMemory = errors.New("no memory to read it into")
)

// tierFetch is a prompt's stored prefix, in memory.
type tierFetch struct {
	first    *input.Input // of the prompt; identifies the request
	from     int          // first position of blocks[0]
	rows     int          // positions [from, rows) can be restored
	expected float64      // seconds that the tier was expected to take
	blocks   []tierFetched
	report   tierpb.RestoreReport

	release func() // ends the lease
	once    sync.Once
}

// tierFetched is a block that has been opened: its header is checked, and its rows too where they lie in private memory.
type tierFetched struct {
	key     kvtier.Key
	first   int
	rows    int // that match the prompt
	file    *kvtier.File
	block   *kvtier.Block
	private bool          // nobody else can write its memory
	check   time.Duration // what its checksums took

	memory *tierMemory
	own    int // bytes of it that are taken for the block
}

// close gives the block's memory back.
func (b *tierFetched) close() {
	b.file.Close()
	b.memory.give(b.own)
	b.file, b.own = nil, 0
}

func (f *tierFetch) close() {
	f.once.Do(func() {
		f.release()
		for i := range f.blocks {
			f.blocks[i].close()
		}
	})
}

// prefetch looks up how much of the prompt is stored, decides whether restoring pays, and maps or reads the blocks.
// It holds no lock while it waits for the sidecar or for a file. nil: nothing to restore.
func (t *kvTier) prefetch(ctx context.Context, inputs []*input.Input) *tierFetch {
	// The last token is always computed: sampling needs its logits.
	most := len(inputs) - 1
	if t.late.Load() > 0 || most < t.config.MinTokens || t.config.Gate == kvtier.GateRecompute || !t.client.Up() {
		return nil
	}
	for _, in := range inputs {
		if in.Multimodal != nil || in.MultimodalHash != 0 {
			return nil
		}
	}
	memory := t.inMemory(inputs)
	if most-memory < t.config.MinTokens {
		return nil
	}
	tokens := make([]int32, len(inputs))
	for i, in := range inputs {
		tokens[i] = in.Token
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
	if !t.stats.restorePays(plan.rows-memory, plan.bytes, plan.seconds) {
		return nil
	}
	f := &tierFetch{first: inputs[0], from: plan.from, rows: plan.from, release: func() {}}
	f.report.LookupSeconds = time.Since(start).Seconds()
	t.fetch(ctx, f, plan, chain, encoded)
	t.stats.spent(time.Since(start))
	if f.rows-memory < t.config.MinTokens {
		f.close()
		return nil
	}
	if t.config.Measure {
		f.report.MemcpySeconds, f.report.MemcpyAllSeconds = measureMemcpy(f)
	}
	t.settle()
	return f
}

// inMemory returns how many of the prompt's first tokens the best slot holds, to avoid needless reading.
func (t *kvTier) inMemory(inputs []*input.Input) int {
	t.server.mu.Lock()
	defer t.server.mu.Unlock()
	best := int32(0)
	for i := range t.server.cache.slots {
		slot := &t.server.cache.slots[i]
		if !slot.InUse || t.server.cache.multiUserCache {
			best = max(best, countCommonPrefix(slot.Inputs, inputs))
		}
	}
	return int(best)
}

// fetchPlan is which blocks to read: those that hold positions [from, rows), from on or before the first wanted.
type fetchPlan struct {
	blocks  []*tierpb.BlockInfo
	from    int
	rows    int
	bytes   uint64
	seconds float64
}

func planFetch(blocks []*tierpb.BlockInfo, memory, most int) fetchPlan {
	p := fetchPlan{from: memory / kvtier.BlockTokens * kvtier.BlockTokens}
	first := 0
	for _, b := range blocks {
		rows := min(int(b.Rows), most-first)
		if rows <= 0 {
			break
		}
		if first >= p.from {
			p.blocks = append(p.blocks, b)
			p.bytes += max(b.StoredBytes, b.RawBytes) // what is copied, whatever the tier keeps
			p.seconds += b.ExpectedSeconds
		}
		p.rows = first + rows
		if rows < kvtier.BlockTokens {
			break
		}
		first += kvtier.BlockTokens
	}
	return p
}

// fetch maps, or reads and verifies, the planned blocks, several at a time, and sets f.rows to the end of the unbroken run
// of them. Of those to be read it takes as many, from the first on, as there is memory for.
func (t *kvTier) fetch(ctx context.Context, f *tierFetch, wanted fetchPlan, chain []kvtier.Key, tokens []byte) {
	timeout := t.stats.getTimeout(wanted.rows-wanted.from, wanted.seconds)
	room := t.memory.take(ctx, wanted.ownBytes(), timeout/tierMemoryWaitShare)
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
	opened := make(chan tierOpened, len(keys))
	slots := make(chan struct{}, max(tierReaders, tierWorkers()))
	n := 0
	start := time.Now()
	release, err := t.client.Get(ctx, t.namespace, keys, tierGetTimeout, func(r *tierpb.GetResponse) error {
		own := 0
		if r.Tier != tierpb.Tier_TIER_RAM {
			own = int(r.FileBytes)
		}
		if room += t.memory.take(ctx, own-room, 0); own > room { // the block has been moved since the look-up
			return errTierMemory
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
			b := tierFetched{
				key: keys[i], first: first, rows: min(kvtier.BlockTokens, plan.rows-first), memory: &t.memory, own: own,
			}
			err := t.openBlock(&b, r, parent, tokens[4*first:])
			<-slots
			opened <- tierOpened{i, b, err}
		}()
		return nil
	})
	f.release = release
	if err != nil {
		slog.Debug("kv tiering: get", "error", err)
	}
	read := plan
	if errors.Is(err, errTierMemory) {
		read = plan.first(n)
	}
	f.expected = read.seconds
	t.shortOfMemory(wanted.rows, read.rows)
	fetched, failed := t.collect(ctx, opened, n)
	f.report.FetchSeconds = time.Since(start).Seconds()
	t.keep(f, fetched, failed)
}

// keep gives f the unbroken run of fetched blocks, and lets go of the others.
func (t *kvTier) keep(f *tierFetch, fetched []tierFetched, failed []error) {
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
func (t *kvTier) reportDamage(key kvtier.Key, err error) {
	if errors.Is(err, kvtier.ErrCorrupt) {
		t.reports.Add(1)
		go func() {
			defer t.reports.Add(-1)
			_ = t.client.ReportCorrupt(t.namespace, key, err.Error())
		}()
	}
}

// tierOpened is what became of the block with number i.
type tierOpened struct {
	i     int
	block tierFetched
	err   error
}

// collect waits for n blocks, but not beyond the context's end: a read that hangs in the kernel must not hold the request.
// What comes later is closed in the background; until then nothing else is fetched.
func (t *kvTier) collect(ctx context.Context, opened <-chan tierOpened, n int) ([]tierFetched, []error) {
	fetched := make([]tierFetched, n)
	failed := slices.Repeat([]error{errTierLate}, n)
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

// openBlock maps or reads one block and checks everything about it before a byte of it is used; the rows of a mapped one,
// which may still change, are checked when they are copied.
func (t *kvTier) openBlock(b *tierFetched, r *tierpb.GetResponse, parent kvtier.Key, tokens []byte) (err error) {
	// A mapped file that somebody truncates faults; that must be a miss, not the end of the runner.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = errors.Join(kvtier.ErrCorrupt, errors.New("fault while reading"))
		}
		if err != nil {
			b.close()
		}
	}()
	open := kvtier.ReadFile
	if r.Tier == tierpb.Tier_TIER_RAM {
		open = kvtier.MapForRead
	} else {
		b.private = true
	}
	if b.file, err = open(r.Path, int(r.FileBytes)); err != nil {
		return err
	}
	if b.block, err = kvtier.Open(b.file.Data); err != nil {
		return err
	}
	if err = b.block.Matches(t.namespace, b.key, parent, b.first, b.rows, tokens, t.layers, t.dtype); err != nil {
		return err
	}
	if b.private {
		start := time.Now()
		err = b.block.Verify()
		b.check = time.Since(start)
	}
	return err
}
