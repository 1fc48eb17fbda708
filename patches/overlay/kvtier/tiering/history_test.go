package tiering

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// What is stored where tokens do not decide the bits of rows, in the running sidecar that KVTIER_TEST_SOCKET names. A history is what
// every position's rows were computed with: a byte for each.

type history []byte

// then is the history that goes on from the first rows of one, up to a position.
func (h history) then(keep, to int, salt byte) history {
	next := append(history(nil), h[:keep]...)
	for len(next) < to {
		next = append(next, salt)
	}
	return next
}

// byRows is the tiering of a model, named by the test, after a restart: no slot holds anything.
func byRows(t *testing.T, slots int) *Tiering {
	t.Helper()
	socket := os.Getenv("KVTIER_TEST_SOCKET")
	if socket == "" {
		t.Skip("KVTIER_TEST_SOCKET does not name the socket of a running sidecar")
	}
	tier := fake(t, slots)
	model := tier.model
	model.ByRows = true
	model.Description = kvtier.Description{
		Model: "model.gguf", Engine: "test", CacheDType: "f16", Layers: model.Layers, Extra: fmt.Sprintf("%s.%d", t.Name(), os.Getpid()),
	}.Proto()
	file, err := kvtier.LookAt(os.Args[0]) // stands for the model's
	if err != nil {
		t.Fatal(err)
	}
	model.Files = []kvtier.LoadedFile{file}
	tier.bind(newFakeRows(2*len(model.Layers)), model)
	tier.stats.prefillRate = 1
	client, err := kvtier.NewClient(socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	for deadline := time.Now().Add(10 * time.Second); !client.Up(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the sidecar on %s does not answer", socket)
		}
	}
	tier.client, tier.up = client, tier.serves
	return tier
}

// compute lets a slot keep the first rows of what it holds, and computes the others of a history.
func (t *Tiering) compute(slot, keep int, h history) {
	t.host.Lock()
	defer t.host.Unlock()
	t.BeforeDiscard(slot, keep)
	t.rows.Drop(slot, keep)
	t.goOn(slot, keep, h)
	t.slots[slot].load(keep, keep, len(h))
}

// goOn computes the rows of a history from a position on.
func (t *Tiering) goOn(slot, from int, h history) {
	cells := t.rows.Find(slot, from, len(h)-from, nil)
	for segment := range 2 * len(t.model.Layers) {
		t.rows.Write(segment, cells, rows.Chunk{Data: h.rows(from, len(h), segment)})
	}
	t.rows.Occupy(slot, from, cells)
}

func (h history) rows(from, to, segment int) (all []byte) {
	for position := from; position < to; position++ {
		for i := range fakeRowBytes {
			all = append(all, byte(position)+h[position]+byte(i*segment))
		}
	}
	return all
}

// fingerprint is that of a whole block.
func (h history) fingerprint(t *Tiering, first int) []byte {
	l := t.layout(kvtier.BlockTokens, nil)
	file := make([]byte, l.Bytes)
	for i, s := range l.Segments {
		copy(file[s.Offset:], h.rows(first, first+kvtier.BlockTokens, i))
	}
	return kvtier.FingerprintOf(l.Checksums(file))
}

// ended stores what a slot holds.
func (t *Tiering) ended(tt *testing.T, slot int, tokens []int32) {
	tt.Helper()
	t.host.Lock()
	t.Finished(slot, Text(tokens), 0)
	t.host.Unlock()
	t.storeAll(tt)
}

// storeAll does what the snapshot loop does.
func (t *Tiering) storeAll(tt *testing.T) {
	tt.Helper()
	for t.work.length() > 0 {
		if err := t.snapshot(t.work.take()); err != nil {
			tt.Fatal(err)
		}
		t.work.done()
	}
}

// restored is how many rows of a prompt, which goes on by one token, an empty slot has after a look-up.
func (t *Tiering) restored(tokens []int32) int {
	prompt := append(append([]int32(nil), tokens...), 9)
	t.prefetchFor(context.Background(), prompt)
	return t.restoreFor(0, prompt, 0)
}

// hasHistory fails unless a slot holds the rows of a history up to a position.
func (t *Tiering) hasHistory(tt *testing.T, slot, to int, h history) {
	tt.Helper()
	cells := t.rows.Cells(slot, 0, to)
	if cells == nil {
		tt.Fatalf("the slot does not hold %d rows", to)
	}
	for segment := range 2 * len(t.model.Layers) {
		got := make([]byte, len(cells)*fakeRowBytes)
		t.rows.Read(segment, cells, got)
		for i, want := range h.rows(0, to, segment) {
			if got[i] != want {
				tt.Fatalf("position %d has the row of another history", i/fakeRowBytes)
			}
		}
	}
}

func TestAConversationThatGoesOnAfterARegenerateComesBackWhole(t *testing.T) {
	tier := byRows(t, 1)
	first, prompt := history{}.then(0, 300, 1), tokensFrom(1000, 1200)
	answered := append(append([]int32(nil), prompt...), tokensFrom(2000, 2100)...)
	tier.compute(0, 0, first)
	tier.ended(t, 0, answered)

	again := append(append([]int32(nil), prompt...), tokensFrom(3000, 3120)...)
	second := first.then(199, 320, 2) // the prompt's last row is computed alone
	tier.compute(0, 199, second)
	tier.ended(t, 0, again)

	longer := append(append([]int32(nil), again...), tokensFrom(4000, 4180)...)
	third := second.then(320, 500, 3)
	tier.compute(0, 320, third)
	tier.ended(t, 0, longer)

	for _, want := range []struct {
		tokens []int32
		of     history
	}{{longer, third}, {answered, first}} {
		tier = byRows(t, 1)
		if got := tier.restored(want.tokens); got != len(want.tokens) {
			t.Fatalf("%d of %d rows were restored", got, len(want.tokens))
		}
		tier.hasHistory(t, 0, len(want.tokens), want.of)
	}
}

// One text, whose last rows are computed anew, and then more: whatever the slot did meanwhile, what comes back is one history.
func TestTheSameAnswerComputedAnewIsAnotherHistory(t *testing.T) {
	text := tokensFrom(0, 300)
	longer := append(text[:300:300], tokensFrom(4000, 4100)...)
	first := history{}.then(0, 300, 1)
	for name, anew := range map[string]func(*Tiering) (slot int, h history){
		"the last row of a block": func(tier *Tiering) (int, history) {
			h := first.then(255, 300, 2)
			tier.compute(0, 255, h)
			return 0, h
		},
		"the slot starts over": func(tier *Tiering) (int, history) {
			h := first.then(0, 300, 2)
			tier.host.Lock()
			defer tier.host.Unlock()
			tier.BeforeDiscard(0, 299)
			tier.StartOver(0)
			tier.goOn(0, 0, h)
			tier.slots[0].load(0, 0, len(h))
			return 0, h
		},
		"another slot begins with some of its rows": func(tier *Tiering) (int, history) {
			h := first.then(100, 300, 2)
			tier.host.Lock()
			defer tier.host.Unlock()
			tier.BeforeFork(0, 1, 100)
			tier.goOn(1, 0, h)
			tier.slots[1].load(100, 100, len(h))
			return 1, h
		},
		"after a shift that failed": func(tier *Tiering) (int, history) {
			h := first.then(0, 300, 2)
			tier.host.Lock()
			defer tier.host.Unlock()
			full := Text(text)
			tier.BeforeShift(0, &full, 70)
			tier.rows.Drop(0, 0)
			tier.slots[0].load(0, 0, len(h))
			tier.goOn(0, 0, h)
			return 0, h
		},
	} {
		t.Run(name, func(t *testing.T) {
			tier := byRows(t, 2)
			tier.compute(0, 0, first)
			tier.ended(t, 0, text)
			slot, h := anew(tier)
			tier.ended(t, slot, text)
			h = h.then(300, 400, 3)
			tier.compute(slot, 300, h)
			tier.ended(t, slot, longer)
			tier = byRows(t, 1)
			if got := tier.restored(longer); got != 400 {
				t.Fatalf("%d of 400 rows were restored", got)
			}
			tier.hasHistory(t, 0, 400, h)
		})
	}
}

func TestTwoSlotsWithOneTextAreNotMixed(t *testing.T) {
	tier := byRows(t, 2)
	text := tokensFrom(0, 300)
	of := []history{history{}.then(0, 300, 1), history{}.then(0, 300, 2)}
	ends := [][]int32{append(text[:300:300], tokensFrom(5000, 5100)...), append(text[:300:300], tokensFrom(6000, 6120)...)}
	for slot := range of {
		tier.compute(slot, 0, of[slot])
		tier.ended(t, slot, text)
	}
	for slot := range of { // in turns
		of[slot] = of[slot].then(300, len(ends[slot]), byte(3+slot))
		tier.compute(slot, 300, of[slot])
		tier.ended(t, slot, ends[slot])
	}
	for slot, tokens := range ends {
		tier = byRows(t, 1)
		if got := tier.restored(tokens); got != len(tokens) {
			t.Fatalf("%d of %d rows were restored", got, len(tokens))
		}
		tier.hasHistory(t, 0, len(tokens), of[slot])
	}
}

func TestWhatASlotHoldsOfAnotherHistoryIsReplaced(t *testing.T) {
	for _, c := range []struct {
		name   string
		salt   byte
		stored bool // the sidecar knows what the slot holds
		from   int  // of the fetch
	}{{"the same", 1, true, 128}, {"another", 2, true, 0}, {"not known yet", 1, false, 0}, {"another, not stored yet", 2, false, 0}} {
		t.Run(c.name, func(t *testing.T) {
			tier := byRows(t, 1)
			tokens, stored := tokensFrom(0, 300), history{}.then(0, 300, 1)
			tier.compute(0, 0, stored)
			tier.ended(t, 0, tokens)

			tier = byRows(t, 1)
			mine := history{}.then(0, 140, c.salt)
			tier.compute(0, 0, mine)
			tier.host.Lock()
			tier.Finished(0, Text(tokens[:140]), 0)
			tier.host.Unlock()
			if c.stored {
				tier.storeAll(t)
			}
			prompt := append(tokens[:300:300], 9)
			f := tier.prefetchFor(t.Context(), prompt)
			if f == nil || f.from != c.from {
				t.Fatalf("the fetch begins at %+v", f)
			}
			tier.host.Lock()
			tier.BeforeDiscard(0, 140)
			tier.host.Unlock()
			if got := tier.restoreFor(0, prompt, 140); got != 300 {
				t.Fatalf("goes on from %d", got)
			}
			tier.hasHistory(t, 0, 300, stored)
			tier.storeAll(t)
			held := [][]byte{mine.fingerprint(tier, 0), mine.fingerprint(tier, 64)}
			request := &tierpb.LookUpRequest{
				Namespace: tier.namespace[:], Tokens: kvtier.TokenBytes(tokens), BlockTokens: kvtier.BlockTokens,
				MostRows: 300, MemoryRows: 128, MinTokens: 1, ByRows: true, Fingerprints: held,
			}
			start := uint32(0)
			release, err := tier.client.LookUp(t.Context(), request, time.Second, func(plan *tierpb.LookUpPlan) time.Duration {
				start = plan.StartRow
				return time.Second
			}, func(*tierpb.NamedFile) error { return nil })
			if release(); err != nil || start != 128 {
				t.Fatalf("what the slot held before is not stored: it goes on from %d, %v", start, err)
			}
			// What is computed now is stored behind what the slot holds.
			longer := append(tokens[:300:300], tokensFrom(7000, 7100)...)
			tier.host.Lock()
			tier.goOn(0, 300, stored.then(300, 400, 5))
			tier.host.Unlock()
			tier.ended(t, 0, longer)
			tier = byRows(t, 1)
			if got := tier.restored(longer); got != 400 {
				t.Fatalf("%d of 400 rows were restored", got)
			}
			tier.hasHistory(t, 0, 400, stored.then(300, 400, 5))
		})
	}
}

func TestAFetchOfAnotherHistoryThanTheSlotHasByThenIsLeft(t *testing.T) {
	tier := byRows(t, 1)
	tokens, stored := tokensFrom(0, 300), history{}.then(0, 300, 1)
	tier.compute(0, 0, stored)
	tier.ended(t, 0, tokens)
	tier.compute(0, 140, stored[:140])
	prompt := append(tokens[:300:300], 9)
	if f := tier.prefetchFor(t.Context(), prompt); f == nil || f.from != 128 {
		t.Fatalf("the fetch begins at %+v", f)
	}
	other := history{}.then(0, 140, 2)
	tier.compute(0, 0, other) // another request had the slot meanwhile
	tier.ended(t, 0, tokens[:140])
	if got := tier.restoreFor(0, prompt, 140); got != 140 || tier.slots[0].short.reason != memoryGone {
		t.Fatalf("goes on from %d, %v", got, tier.slots[0].short)
	}
	tier.hasHistory(t, 0, 140, other)
}

// Exported counts what is copied out of cells.
func (h *fakeHost) Exported(int, []int32) { h.exported++ }

func TestWhatIsKnownToBeStoredIsNotCopiedAgain(t *testing.T) {
	tier := byRows(t, 1)
	tokens, h := tokensFrom(0, 310), history{}.then(0, 310, 1)
	tier.compute(0, 0, h[:256])
	tier.ended(t, 0, tokens[:256])
	before := tier.fakeHost().exported
	tier.compute(0, 256, h)
	tier.ended(t, 0, tokens)
	if n := tier.fakeHost().exported - before; n != 1 {
		t.Errorf("%d blocks were copied, of which one is new", n)
	}
	before = tier.fakeHost().exported
	tier.storeAgain()
	tier.storeAll(t)
	if n := tier.fakeHost().exported - before; n != 0 {
		t.Errorf("%d blocks were copied that the sidecar has", n)
	}
}

func TestARowThatIsNotTheNotedOneIsNotStored(t *testing.T) {
	tier := byRows(t, 1)
	tokens, h := tokensFrom(0, 128), history{}.then(0, 128, 1)
	tier.compute(0, 0, h)
	tier.ended(t, 0, tokens)
	l := tier.slots[0].lineage
	wrong := &block{link: l.chain[0], rows: 64, layout: tier.layout(64, nil), copied: true}
	wrong.payload = make([]byte, wrong.layout.Bytes)
	wrong.payload[0] = 99
	wrong.link.fingerprint[0] ^= 1 // as if the rows had changed since they were noted
	if done, err := tier.store(l, []*block{wrong}, nil); done > 0 {
		t.Errorf("a block was stored under the name of other rows: %v", err)
	}
}

func TestWhatASlotKeptIsAnotherBlockUnderAnotherText(t *testing.T) {
	tier := byRows(t, 1)
	h := history{}.then(0, 128, 1)
	tier.compute(0, 0, h)
	tier.ended(t, 0, tokensFrom(0, 128))
	tier.host.Lock()
	defer tier.host.Unlock()
	tier.BeforeDiscard(0, 128)
	ts := &tier.slots[0]
	ts.note(Text(append(tokensFrom(0, 64), tokensFrom(900, 964)...)), nil)
	ts.lineage.follow(tier, 2)
	if first, second := ts.lineage.chain[0], ts.lineage.chain[1]; !first.known(tier) || second.known(tier) {
		t.Errorf("blocks are taken for those of another text: %v %v", first.fingerprint, second.fingerprint)
	}
}

func TestWindowsHangOnTheRowsOfTheirHistory(t *testing.T) {
	defer func(bytes int) { holdBytes = bytes }(holdBytes)
	withWindow := func() *Tiering {
		tier := byRows(t, 1)
		tier.model.Windows = []Window{{
			Child: 1, Size: 100, Cells: fakeCells, DType: "f16", Rows: fakeWindowRows{newFakeRows(2)},
			Layers: []kvtier.Layer{{Child: 1, Kind: "swa", Window: 100, KVHeads: 2, KHeadDim: 4, VHeadDim: 4, KRowBytes: fakeRowBytes, VRowBytes: fakeRowBytes}},
		}}
		return tier
	}
	text := tokensFrom(0, 300)
	for salt := byte(1); salt < 3; salt++ {
		tier := withWindow()
		holdBytes = 5 * tier.layout(64, nil).Bytes // the chain, and nothing beside it, is copied at once
		h := history{}.then(0, 300, salt)
		tier.compute(0, 0, h)
		w := tier.model.Windows[0].Rows
		cells := tier.rows.Find(0, 0, 100, nil)
		for segment := range 2 {
			w.Write(segment, cells, rows.Chunk{Data: h.rows(200, 300, segment)})
		}
		w.Occupy(0, 200, cells)
		tier.ended(t, 0, text)
	}
	tier := withWindow()
	if got := tier.restored(text); got != 300 {
		t.Fatalf("%d of 300 rows were restored", got)
	}
	h := history{}.then(0, 300, 2) // used last
	tier.hasHistory(t, 0, 300, h)
	for segment := range 2 {
		got := make([]byte, 100*fakeRowBytes)
		w := tier.model.Windows[0].Rows
		w.Read(segment, w.Cells(0, 200, 300), got)
		if string(got) != string(h.rows(200, 300, segment)) {
			t.Errorf("segment %d of the window is of another history", segment)
		}
	}
}

func TestAnOlderSidecarIsAskedForNothing(t *testing.T) {
	tier, store := withSidecar(t, 1, 300, tierpb.Tier_TIER_RAM)
	tier.model.ByRows, store.older, tier.up = true, true, tier.serves
	client, err := kvtier.NewClient(store.socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	for tier.client = client; !client.Up(); time.Sleep(time.Millisecond) {
	}
	store.has = func(context.Context) error { t.Error("it was asked"); return nil }
	l := tier.prefetch(t.Context(), Text(tokensFrom(0, 301)), 301, tier.held0)
	if l.fetch != nil || l.short.reason != sidecarAway || tier.up() {
		t.Errorf("%+v", l)
	}
	tier.compute(0, 0, history{}.then(0, 300, 1))
	tier.slots[0].note(Text(tokensFrom(0, 300)), nil)
	if err := tier.snapshot(tier.slots[0].lineage); err != errOlder || len(store.put) > 0 || len(tier.slots[0].lineage.blocks) > 0 {
		t.Errorf("stored: %v, %v", store.put, err)
	}
}

func TestAnAnswerThatDoesNotHangTogetherIsLeft(t *testing.T) {
	tier, store := withSidecar(t, 1, 300, tierpb.Tier_TIER_RAM)
	tier.model.ByRows = true
	store.fingerprint = []byte("of other")
	if f := tier.prefetchFor(t.Context(), tokensFrom(0, 301)); f != nil {
		t.Errorf("%d rows were fetched whose keys are not those of their fingerprints", f.rows)
	}
}
