package tiering

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// incoming is an answer whose files are opened, or read and verified, while others still come: several at a time.
type incoming struct {
	f       *fetch
	plan    *tierpb.LookUpPlan
	before  []kvtier.Key // of the blocks before the first
	keys    []kvtier.Key // of those that were begun
	blocks  *readers[*fetchedBlock]
	windows *readers[*fetchedWindow]
	ends    []windowPart       // the last block of each window
	room    int                // bytes that may be read into memory, and no block has taken over
	ctx     context.Context    // ends with the time for the files
	cancel  context.CancelFunc // of it
	began   time.Time
}

// read asks, and opens what is planned. It sets f.rows to the end of the unbroken run of blocks that are there, and returns up to
// which row that is planned, and what ended the run before that; unexplained if nothing did. Of files to be read it takes as many,
// from the first on, as there is memory for.
func (f *fetch) read(ctx context.Context, request *tierpb.LookUpRequest, timeout time.Duration) (planned int, cut tierpb.Shortfall) {
	asked := time.Now()
	in := &incoming{f: f, cancel: func() {}}
	defer func() { // what no block has taken over
		in.cancel()
		f.t.memory.give(in.room)
	}()
	var wrong error
	release, err := f.t.client.LookUp(ctx, request, timeout, func(plan *tierpb.LookUpPlan) time.Duration {
		f.report.LookupSeconds = time.Since(asked).Seconds()
		if wrong = in.begin(ctx, request, plan); wrong != nil || plan.Files == 0 {
			return getLeast
		}
		return time.Until(in.began.Add(in.timeout()))
	}, func(file *tierpb.NamedFile) error {
		if wrong != nil {
			return wrong
		}
		return in.add(file)
	})
	f.release = release
	if err == nil {
		err = wrong
	}
	if err != nil {
		slog.Debug("kv tiering: look-up", "error", err)
	}
	switch {
	case in.blocks == nil && err != nil:
		return 0, callReason(err, sidecarLate)
	case in.blocks == nil:
		return 0, unexplained // nothing is planned, and the plan says why
	}
	return int(in.plan.EndRow), in.end(err)
}

// begin takes a plan, and the memory that it needs.
func (in *incoming) begin(ctx context.Context, request *tierpb.LookUpRequest, plan *tierpb.LookUpPlan) error {
	f, t := in.f, in.f.t
	in.plan = plan
	f.short = shortfall{plan.Reason, int(plan.AtRow)}
	if plan.Files == 0 {
		return nil
	}
	start, end := int(plan.StartRow), int(plan.EndRow)
	blocks := (end - start + kvtier.BlockTokens - 1) / kvtier.BlockTokens
	if start%kvtier.BlockTokens != 0 || start > int(request.MemoryRows) || end <= start || end > int(request.MostRows) ||
		int(plan.Files) != blocks+len(t.model.Windows) || (t.model.ByRows && start/kvtier.BlockTokens > len(f.held)) {
		return errAnswer
	}
	f.from, f.rows = start, start
	f.links = f.held[:min(len(f.held), start/kvtier.BlockTokens)]
	in.before = f.keysBefore(start)
	timeout := in.timeout()
	in.room = t.memory.take(ctx, int(min(plan.OwnBytes, 1<<62)), timeout/memoryWaitShare)
	in.began = time.Now() // the files have all of their time, however long the memory was waited for
	in.ctx, in.cancel = context.WithDeadline(ctx, in.began.Add(timeout))
	in.blocks, in.windows = newReaders[*fetchedBlock](t, blocks), newReaders[*fetchedWindow](t, len(t.model.Windows))
	in.keys = make([]kvtier.Key, 0, blocks)
	return nil
}

// timeout is how long all files may take.
func (in *incoming) timeout() time.Duration {
	return in.f.t.stats.getTimeout(int(in.plan.EndRow-in.plan.StartRow), in.plan.ExpectedSeconds)
}

// keysBefore are the keys of the blocks before a position, which is the start of one.
func (f *fetch) keysBefore(start int) (keys []kvtier.Key) {
	if !f.t.model.ByRows {
		return kvtier.Chain(f.t.namespace, f.tokens[:4*start], f.prompt.Extras)
	}
	for _, k := range f.held[:start/kvtier.BlockTokens] {
		keys = append(keys, k.key)
	}
	return keys
}

// key is that of a block of the prompt, the number'th from its first on.
func (in *incoming) key(number int) kvtier.Key {
	switch {
	case number < 0:
		return in.f.t.namespace
	case number < len(in.before):
		return in.before[number]
	}
	return in.keys[number-len(in.before)]
}

// add begins to open a file. The blocks come first, then the last block of each window.
func (in *incoming) add(file *tierpb.NamedFile) error {
	if len(file.Key) != len(kvtier.Key{}) || file.FileBytes > 1<<62 {
		return errAnswer
	}
	if len(in.keys) < cap(in.keys) {
		return in.addBlock(file, kvtier.Key(file.Key))
	}
	return in.addWindow(file, kvtier.Key(file.Key))
}

func (in *incoming) addBlock(file *tierpb.NamedFile, key kvtier.Key) error {
	f, t := in.f, in.f.t
	own := 0
	if file.Tier != tierpb.Tier_TIER_RAM {
		own = int(file.FileBytes)
	}
	if in.room += t.memory.take(in.ctx, own-in.room, 0); own > in.room { // too little, or it has been moved since it was planned
		return errMemory
	}
	first := f.from + len(in.keys)*kvtier.BlockTokens
	rows := min(kvtier.BlockTokens, int(in.plan.EndRow)-first)
	if !f.follow(first, rows, file.Fingerprint, key) {
		return errAnswer
	}
	b := &fetchedBlock{key: key, first: first, rows: rows, memory: &t.memory, own: own}
	parent := in.key(first/kvtier.BlockTokens - 1)
	err := in.blocks.begin(in.ctx, func() (*fetchedBlock, error) {
		return b, t.openBlock(b, file, parent, f.tokens[4*first:], kvtier.ExtrasOf(f.prompt.Extras, first, b.rows))
	})
	if err == nil {
		in.room -= own
		in.keys = append(in.keys, key)
	}
	return err
}

// follow notes a whole block where rows name it. It reports whether the block hangs together with those before: no answer joins
// what does not.
func (f *fetch) follow(first, rows int, fingerprint []byte, key kvtier.Key) bool {
	if !f.t.model.ByRows || rows < kvtier.BlockTokens {
		return true
	}
	k := &link{
		first: first, rows: rows, fingerprint: fingerprint,
		tokens: f.tokens[4*first : 4*(first+rows)], extras: kvtier.ExtrasOf(f.prompt.Extras, first, rows),
	}
	if len(f.links) > 0 {
		k.before = f.links[len(f.links)-1]
	}
	f.links = append(f.links[:len(f.links):len(f.links)], k)
	return k.name(f.t) && k.key == key
}

// end waits for what was begun. It returns what ended the run of blocks before the plan does; err is how the answer ended.
func (in *incoming) end(err error) tierpb.Shortfall {
	f, t := in.f, in.f.t
	blocks, failed := in.blocks.collect(in.ctx)
	bad := t.keep(f, in.keys, blocks, failed)
	short := in.endWindows()
	f.report.FetchSeconds = time.Since(in.began).Seconds()
	f.expected = in.plan.ExpectedSeconds * float64(in.blocks.n) / float64(cap(in.keys))
	if errors.Is(err, errMemory) {
		t.shortOfMemory(int(in.plan.EndRow), f.rows)
	}
	switch {
	case bad != nil:
		return blockReason(bad)
	case err != nil:
		return callReason(err, filesLate)
	case len(in.keys) < cap(in.keys):
		return blocksGone
	}
	return short // of what goes with the rows
}
