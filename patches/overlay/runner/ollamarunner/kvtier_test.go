package ollamarunner

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
	"github.com/ollama/ollama/ml"
	"github.com/ollama/ollama/model/input"
)

// A backend that only has memory: enough for a Causal cache whose rows are read and written, never computed.
type (
	tierFakeBackend struct{ ml.Backend }
	tierFakeContext struct{ ml.Context }
	tierFakeTensor  struct {
		ml.Tensor
		dims []int
		data []byte
	}
)

func (tierFakeBackend) NewContextSize(int) ml.Context { return tierFakeContext{} }

func (tierFakeContext) Layer(int) ml.Context { return tierFakeContext{} }

func (c tierFakeContext) Input() ml.Context { return c }

func (c tierFakeContext) Forward(...ml.Tensor) ml.Context { return c }

func (tierFakeContext) Close() {}

func (tierFakeContext) FromInts(s []int32, shape ...int) ml.Tensor { return tierFakeNew(len(s)) }

func (tierFakeContext) FromFloats(s []float32, shape ...int) ml.Tensor { return tierFakeNew(len(s)) }

func (tierFakeContext) Zeros(_ ml.DType, shape ...int) ml.Tensor { return tierFakeNew(shape...) }

func tierFakeNew(dims ...int) *tierFakeTensor {
	n := 2
	for _, d := range dims {
		n *= d
	}
	return &tierFakeTensor{dims: dims, data: make([]byte, n)}
}

func (t *tierFakeTensor) Dim(n int) int { return t.dims[n] }

func (t *tierFakeTensor) Stride(n int) int {
	s := 2
	for i := range n {
		s *= t.dims[i]
	}
	return s
}

func (t *tierFakeTensor) DType() ml.DType { return ml.DTypeF16 }

func (t *tierFakeTensor) Reshape(ml.Context, ...int) ml.Tensor { return t }

func (t *tierFakeTensor) SetRows(ml.Context, ml.Tensor, ml.Tensor) ml.Tensor { return t }

func (t *tierFakeTensor) KVTierHost() []byte {
	if tierFakeDevice {
		return nil
	}
	return t.data
}

func (t *tierFakeTensor) KVTierGet(offset int, dst []byte) { copy(dst, t.data[offset:]) }

func (t *tierFakeTensor) KVTierSet(offset int, src []byte) { copy(t.data[offset:], src) }

const tierFakeCtx = 1024

var tierFakeDevice bool // the CPU can't access the tensors' memory

// tierFake returns a runner's tiering over a cache of two layers and slots slots, without a sidecar.
func tierFake(t *testing.T, slots int) *kvTier {
	t.Helper()
	cache := kvcache.NewCausalCache(nil)
	cache.Init(tierFakeBackend{}, ml.DTypeF16, slots, tierFakeCtx, 32)
	ctx := tierFakeContext{}
	if err := cache.StartForward(ctx, input.Batch{Positions: []int32{0}, Sequences: []int{0}}, true); err != nil {
		t.Fatal(err)
	}
	for layer := range 2 {
		cache.SetLayer(layer)
		cache.Put(ctx, tierFakeNew(4, 2, 1), tierFakeNew(4, 2, 1))
	}
	if reason := cache.KVTierUnsupported(); reason != "" {
		t.Fatal(reason)
	}
	s := &Server{cache: &InputCache{numCtx: tierFakeCtx, enabled: true, slots: make([]InputCacheSlot, slots), cache: cache}}
	for i := range s.cache.slots {
		s.cache.slots[i].Id = i
	}
	client, err := kvtier.NewClient(t.TempDir()+"/none.sock", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	tier := &kvTier{
		config: kvtier.Config{MinTokens: 1, Snapshot: true, Gate: kvtier.GateRestore}, client: client, up: func() bool { return true }, server: s, cache: cache,
		dtype: "f16", onHost: true, sync: func() {}, work: newTierQueue(),
		fetches: make(map[*input.Input]*tierFetch), namespace: kvtier.Namespace{1},
	}
	for _, l := range cache.KVTierLayers() {
		tier.layers = append(tier.layers, kvtier.Layer{
			Layer: l.Layer, Kind: "full", KVHeads: l.KVHeads, KHeadDim: l.KHeadDim, VHeadDim: l.VHeadDim,
			KRowBytes: l.KRowBytes, VRowBytes: l.VRowBytes,
		})
	}
	tier.batches.init()
	for i := range slots {
		tier.slots = append(tier.slots, newTierSlot(i))
	}
	activeTier.Store(tier)
	batchesTier.Store(tier)
	t.Cleanup(func() { activeTier.Store(nil) })
	return tier
}

func tierInputs(from, to int) []*input.Input {
	var in []*input.Input
	for i := from; i < to; i++ {
		in = append(in, &input.Input{Token: int32(i)})
	}
	return in
}

// fillSlot gives the slot inputs whose rows hold (position + salt) in every byte.
func (t *kvTier) fillSlot(slot int, inputs []*input.Input, salt byte) {
	cells := t.cache.KVTierFreeCells(len(inputs), nil)
	for _, layer := range t.layers {
		for _, v := range []bool{false, true} {
			rowBytes := layer.RowBytes(v)
			all := make([]byte, len(inputs)*rowBytes)
			for i := range all {
				all[i] = byte(i/rowBytes) + salt
			}
			t.cache.KVTierPlane(layer.Layer, v).Write(cells, rows.Chunk{Data: all})
		}
	}
	t.cache.KVTierOccupy(slot, 0, cells)
	t.server.cache.slots[slot].Inputs = inputs
}

func tierRows(blocks []*tierBlock) [][2]int {
	var out [][2]int
	for _, b := range blocks {
		out = append(out, [2]int{b.first, b.rows})
	}
	return out
}

func TestTierPlanIsWholeBlocksThenTheTailOfAnEndedSequence(t *testing.T) {
	tier := tierFake(t, 1)
	ts := &tier.slots[0]
	ts.note(tierInputs(0, 150), nil)
	ts.lineage.plan(tier)
	if got := tierRows(ts.lineage.blocks); !slices.Equal(got, [][2]int{{0, 64}, {64, 64}}) {
		t.Fatalf("in progress: %v", got)
	}
	ts.note(tierInputs(0, 200), nil)
	ts.lineage.finished = true
	ts.lineage.plan(tier)
	ts.lineage.plan(tier) // nothing new
	if got := tierRows(ts.lineage.blocks); !slices.Equal(got, [][2]int{{0, 64}, {64, 64}, {128, 64}, {192, 8}}) {
		t.Fatalf("ended: %v", got)
	}
	encoded := ts.lineage.tokens
	for i, key := range kvtier.Chain(tier.namespace, encoded) {
		if ts.lineage.blocks[i].key != key {
			t.Errorf("key %d is not the prefix chain hash", i)
		}
	}
	tail := ts.lineage.blocks[3]
	if tail.parent != ts.lineage.blocks[2].key || tail.key != kvtier.BlockKey(tail.parent, encoded[4*192:], nil) {
		t.Error("the tail's key is not that of its tokens")
	}
}

func TestTierNothingBeyondNumKeepIsPublishedAfterAShift(t *testing.T) {
	tier := tierFake(t, 1)
	slot := &tier.server.cache.slots[0]
	tier.fillSlot(0, tierInputs(0, 300), 0)
	tierBeforeShift(slot, 70)
	before := tier.slots[0].older
	if len(before) != 1 || len(before[0].blocks) != 5 {
		t.Fatalf("what was exact before the shift is not saved: %v", before)
	}
	for _, b := range before[0].blocks {
		// all of them, also those before 70: a shift that fails empties the slot
		if !b.copied {
			t.Errorf("block at %d was not copied before the shift", b.first)
		}
	}
	// the shift: positions from 70 on now hold other tokens, turned in place
	slot.Inputs = append(tierInputs(0, 70), tierInputs(185, 300)...)
	ts := &tier.slots[0]
	ts.note(slot.Inputs, nil)
	ts.lineage.finished = true
	ts.lineage.plan(tier)
	for _, b := range ts.lineage.blocks {
		if b.first+b.rows > 70 {
			t.Errorf("rows %d to %d are published after a shift that kept 70", b.first, b.first+b.rows)
		}
	}
	// the next request reuses 120 rows of it: still tainted
	ts.discard(tier, 120)
	ts.load(120, 120, 400)
	if ts.taint != 70 {
		t.Errorf("taint %d, want 70", ts.taint)
	}
	// and one that reuses 70 is exact again
	ts.discard(tier, 70)
	ts.load(70, 70, 400)
	if ts.taint != tierNoTaint {
		t.Errorf("taint %d after everything tainted was discarded", ts.taint)
	}
}

func TestTierRestoreOverATaintedRestOfASlotIsExact(t *testing.T) {
	tier := tierFake(t, 1)
	ts := &tier.slots[0]
	ts.taint = 4
	ts.load(3, 500, 600) // 3 rows shared with what was shifted, 497 from the store
	if ts.taint != tierNoTaint {
		t.Errorf("taint %d: nothing of this conversation would be stored any more", ts.taint)
	}
}

func TestTierNothingIsCopiedWhenNothingCanBeStored(t *testing.T) {
	tier := tierFake(t, 1)
	tier.up = func() bool { return false }
	tier.fillSlot(0, tierInputs(0, 200), 0)
	ts := &tier.slots[0]
	ts.note(tier.server.cache.slots[0].Inputs, nil)
	ts.discard(tier, 0)
	if len(ts.older) != 0 {
		t.Errorf("%d contents kept without a sidecar", len(ts.older))
	}
}

func TestTierCopiesWaitingToBeStoredAreBoundedInAll(t *testing.T) {
	tier := tierFake(t, 1)
	ts := &tier.slots[0]
	block := tier.layout(64).FileBytes
	ts.older = []*tierLineage{{blocks: []*tierBlock{{copied: true, layout: tier.layout(64), file: make([]byte, tierCatchUpBytes-block)}}}}
	tier.fillSlot(0, tierInputs(0, 256), 0)
	ts.note(tier.server.cache.slots[0].Inputs, nil)
	current := ts.lineage
	ts.discard(tier, 0)
	for i, b := range current.blocks {
		if b.copied != (i == 0) || b.lost != (i > 0) {
			t.Errorf("block %d: copied=%v lost=%v", i, b.copied, b.lost)
		}
	}
}

func TestTierForkInheritsTaintOnlyWhenItCopiesTaintedRows(t *testing.T) {
	tier := tierFake(t, 2)
	tier.slots[0].taint = 50
	tierBeforeFork(&tier.server.cache.slots[0], &tier.server.cache.slots[1], 50)
	if tier.slots[1].taint != tierNoTaint {
		t.Error("50 exact rows made the copy tainted")
	}
	tierBeforeFork(&tier.server.cache.slots[0], &tier.server.cache.slots[1], 51)
	if tier.slots[1].taint != 50 {
		t.Error("a tainted row was copied as exact")
	}
}

func TestTierDiscardCopiesWhatIsLostAndLaterContentIsNotMistakenForIt(t *testing.T) {
	tier := tierFake(t, 1)
	tier.fillSlot(0, tierInputs(0, 200), 0)
	slot := &tier.server.cache.slots[0]
	ts := &tier.slots[0]
	ts.note(slot.Inputs, nil)
	ts.lineage.finished = true
	old := ts.lineage

	// first the slot keeps 128 rows: whole blocks 0 and 1 stay in the cells, block 2 and the tail are copied now
	tierBeforeDiscard(slot, 128)
	if err := tier.cache.Remove(0, 128, math.MaxInt32); err != nil {
		t.Fatal(err)
	}
	for i, copied := range []bool{false, false, true, true} {
		if old.blocks[i].copied != copied {
			t.Fatalf("block %d copied=%v", i, !copied)
		}
	}
	if got := old.blocks[2].file[old.blocks[2].layout.Segments[0].Offset]; got != 128 {
		t.Errorf("block 2 holds rows from %d on", got)
	}
	// then all of it goes, before the snapshot ran: they are copied before other content takes the cells
	ts.load(128, 128, 300)
	tierBeforeDiscard(slot, 0)
	for i, b := range old.blocks {
		if !b.copied {
			t.Fatalf("block %d of the older content was lost", i)
		}
		if got := b.file[b.layout.Segments[0].Offset]; got != byte(64*i) {
			t.Errorf("block %d holds rows from %d on", i, got)
		}
	}
	if err := tier.cache.Remove(0, 0, math.MaxInt32); err != nil {
		t.Fatal(err)
	}
	tier.fillSlot(0, tierInputs(1000, 1200), 77)
	late := &tierBlock{first: 0, rows: 64, layout: tier.layout(64), file: make([]byte, tier.layout(64).FileBytes)}
	tier.export(old, late)
	if late.copied || !late.lost {
		t.Error("rows of later content were exported under the older content's key")
	}
}

func TestTierBatchesPendingCellsAreThoseNotYetComputed(t *testing.T) {
	var b tierBatches
	b.init()
	b.built(1, []int32{4, 5})
	b.begin(1)
	b.built(2, []int32{6})
	if got := b.pending(); len(got) != 3 {
		t.Errorf("pending %v", got)
	}
	b.end(1)
	if _, ok := b.pending()[6]; !ok || len(b.pending()) != 1 {
		t.Errorf("pending %v", b.pending())
	}
	b.waitNoneRunning() // batch 2 is built only: returns at once
	start := time.Now()
	b.settle(30 * time.Millisecond)
	if took := time.Since(start); took < 30*time.Millisecond || took > time.Second {
		t.Errorf("waited %v for a batch that never ends", took)
	}
	b.begin(2)
	go func() { time.Sleep(10 * time.Millisecond); b.end(2) }()
	b.wait([]int{2})
	b.settle(time.Hour) // nothing is built: returns at once
	b.built(3, []int32{1})
	go func() {
		time.Sleep(10 * time.Millisecond)
		b.built(4, []int32{2}) // built while waiting: not waited for
		b.end(3)
	}()
	b.settle(time.Hour)
}

func TestTierRestoreAvoidsPendingCellsAndFillsTheSlot(t *testing.T) {
	tier := tierFake(t, 1)
	tier.batches.built(7, []int32{2, 3})
	rows := 64 + 10
	prompt := tierInputs(0, rows+1)
	f := &tierFetch{first: prompt[0], rows: rows, release: func() {}}
	for first := 0; first < rows; first += 64 {
		n := min(64, rows-first)
		l := tier.layout(n)
		file := make([]byte, l.FileBytes)
		for _, s := range l.Segments {
			for i := range s.Bytes {
				file[s.Offset+i] = byte(first + i/s.RowBytes)
			}
		}
		key := kvtier.BlockKey(tier.namespace, make([]byte, 4*n), nil)
		if err := l.Seal(file, tier.namespace, key, tier.namespace, first, make([]byte, 4*n), "f16"); err != nil {
			t.Fatal(err)
		}
		b, err := kvtier.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		f.blocks = append(f.blocks, tierFetched{first: first, rows: n, block: b})
	}
	tier.fetches[prompt[0]] = f
	if got := tierRestore(&tier.server.cache.slots[0], prompt, 0, true); int(got) != rows {
		t.Fatalf("resumes at %d, want %d", got, rows)
	}
	cells := tier.cache.KVTierCells(0, 0, int32(rows))
	if slices.Contains(cells, 2) || slices.Contains(cells, 3) {
		t.Errorf("pending cells are used: %v", cells[:8])
	}
	rowBytes := 2 * 4 * 2
	back := make([]byte, rows*rowBytes)
	for layer := range 2 {
		for _, v := range []bool{false, true} {
			tier.cache.KVTierPlane(layer, v).Read(cells, back)
			for i := range back {
				if back[i] != byte(i/rowBytes) {
					t.Fatalf("layer %d v=%v: row %d holds %d", layer, v, i/rowBytes, back[i])
				}
			}
		}
	}
	if len(tier.fetches) != 0 {
		t.Error("the fetch is kept")
	}
}

func TestTierRestoreStaysWithMemoryWhenTheSlotIsTainted(t *testing.T) {
	tier := tierFake(t, 1)
	tier.slots[0].taint = 10
	f := &tierFetch{rows: 100, release: func() {}}
	if got := tier.restore(f, &tier.server.cache.slots[0], 20); got != 20 {
		t.Errorf("resumes at %d", got)
	}
}

func TestTierPanicInAHookTurnsTieringOffNotTheRunner(t *testing.T) {
	tier := tierFake(t, 1)
	tier.slots = nil // any access panics
	slot := &tier.server.cache.slots[0]
	if got := tierRestore(slot, tierInputs(0, 5), 3, true); got != 3 {
		t.Errorf("resumes at %d", got)
	}
	if activeTier.Load() != nil {
		t.Error("tiering is still on")
	}
	tierBeforeDiscard(slot, 0)
}

func TestTierPlanFetchTakesTheUnbrokenRunUpToTheLastTokenButOne(t *testing.T) {
	block := func(rows uint32) *tierpb.BlockInfo {
		return &tierpb.BlockInfo{Rows: rows, BlockRows: 64, StoredBytes: 800, RawBytes: 1000, ExpectedSeconds: 0.5}
	}
	for name, c := range map[string]struct {
		blocks            []*tierpb.BlockInfo
		memory, most      int
		from, rows, fetch int
	}{
		"all":                  {[]*tierpb.BlockInfo{block(64), block(64), block(9)}, 0, 500, 0, 137, 3},
		"never the last token": {[]*tierpb.BlockInfo{block(64), block(64)}, 0, 127, 0, 127, 2},
		"memory has a block":   {[]*tierpb.BlockInfo{block(64), block(64), block(9)}, 70, 500, 64, 137, 2},
		"a partial block ends": {[]*tierpb.BlockInfo{block(64), block(30), block(64)}, 0, 500, 0, 94, 2},
		"nothing to gain":      {[]*tierpb.BlockInfo{block(64)}, 64, 500, 64, 64, 0},
	} {
		p := planFetch(c.blocks, c.memory, c.most)
		if p.from != c.from || p.rows != c.rows || len(p.blocks) != c.fetch || p.bytes != uint64(1000*c.fetch) {
			t.Errorf("%s: from %d rows %d blocks %d", name, p.from, p.rows, len(p.blocks))
		}
	}
}

func TestTierGateComparesMeasuredSpeeds(t *testing.T) {
	s := tierStats{gate: kvtier.GateAuto}
	if !s.restorePays(1000, 1e9, 10) {
		t.Error("nothing measured yet: restore")
	}
	s.prefillRate, s.copyRate = 1000, 1e9
	if s.restorePays(1000, 5e8, 0.6) { // 1.1 s against 1 s
		t.Error("restoring is slower, yet it is chosen")
	}
	if !s.restorePays(1000, 1e8, 0.6) { // 0.7 s against 1 s
		t.Error("restoring is faster, yet it is not chosen")
	}
	if s.counts.SkippedByGate != 1 {
		t.Errorf("%d skipped", s.counts.SkippedByGate)
	}
	s.gate = kvtier.GateRestore
	if !s.restorePays(1, 1e12, 100) {
		t.Error("the switch does not force restoring")
	}
}

func TestTierLookupMayTakeLongerWhenRecomputingTakesVeryLong(t *testing.T) {
	s := tierStats{}
	if got := s.lookupTimeout(30000); got != kvtier.LookupTimeout {
		t.Errorf("nothing measured: %v", got)
	}
	s.prefillMost = prefillMost(1<<30, 2)
	if got := s.lookupTimeout(30000); got != tierLookupMost {
		t.Errorf("30,000 tokens of a model of 1 GiB on 2 cores: %v", got)
	}
	if got := s.lookupTimeout(100); got != kvtier.LookupTimeout {
		t.Errorf("100 tokens of it: %v", got)
	}
	s.prefillRate = 100
	for tokens, want := range map[int]time.Duration{100: kvtier.LookupTimeout, 1000: 500 * time.Millisecond, 30000: tierLookupMost} {
		if got := s.lookupTimeout(tokens); got != want {
			t.Errorf("%d tokens at 100/s: %v, want %v", tokens, got, want)
		}
	}
}
