package tiering

import (
	"bytes"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier"
)

func rowsOf(blocks []*block) [][2]int {
	var out [][2]int
	for _, b := range blocks {
		out = append(out, [2]int{b.first, b.rows})
	}
	return out
}

func TestPlanIsWholeBlocksThenTheTailOfAnEndedSequence(t *testing.T) {
	tier := fake(t, 1)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(0, 150)), nil)
	ts.lineage.plan(tier)
	if got := rowsOf(ts.lineage.blocks); !slices.Equal(got, [][2]int{{0, 64}, {64, 64}}) {
		t.Fatalf("in progress: %v", got)
	}
	ts.note(Text(tokensFrom(0, 200)), nil)
	ts.lineage.finished = true
	ts.lineage.plan(tier)
	ts.lineage.plan(tier) // nothing new
	if got := rowsOf(ts.lineage.blocks); !slices.Equal(got, [][2]int{{0, 64}, {64, 64}, {128, 64}, {192, 8}}) {
		t.Fatalf("ended: %v", got)
	}
	text, n := tier.textOf(ts.lineage.blocks)
	if n != 4 || !bytes.Equal(text.Tokens, kvtier.TokenBytes(tokensFrom(0, 200))) || len(text.Extras)+len(text.Fingerprints) > 0 {
		t.Errorf("%d blocks of %v", n, text)
	}
	for i, want := range [][2]int{{0, 64}, {64, 64}, {128, 64}, {192, 8}} {
		if got := text.Blocks[i]; int(got.FirstRow) != want[0] || int(got.Rows) != want[1] || len(got.Cells) > 0 {
			t.Errorf("block %d is %v", i, got)
		}
	}
}

func TestNothingBeyondNumKeepIsPublishedAfterAShift(t *testing.T) {
	tier := fake(t, 1)
	tier.fillCells(0, 300, 0)
	full := Text(tokensFrom(0, 300))
	tier.BeforeShift(0, &full, 70)
	if tier.fakeHost().quiesced == 0 {
		t.Error("rows were copied beside what computes them")
	}
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
	ts := &tier.slots[0]
	ts.note(Text(append(tokensFrom(0, 70), tokensFrom(185, 300)...)), nil)
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
	if ts.taint != noTaint {
		t.Errorf("taint %d after everything tainted was discarded", ts.taint)
	}
}

func TestRestoreOverATaintedRestOfASlotIsExact(t *testing.T) {
	tier := fake(t, 1)
	ts := &tier.slots[0]
	ts.taint = 4
	ts.load(3, 500, 600) // 3 rows shared with what was shifted, 497 from the store
	if ts.taint != noTaint {
		t.Errorf("taint %d: nothing of this conversation would be stored any more", ts.taint)
	}
}

func TestNothingIsCopiedWhenNothingCanBeStored(t *testing.T) {
	tier := fake(t, 1)
	tier.up = func() bool { return false }
	tier.fillCells(0, 200, 0)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(0, 200)), nil)
	ts.discard(tier, 0)
	if len(ts.older) != 0 {
		t.Errorf("%d contents kept without a sidecar", len(ts.older))
	}
}

func TestCopiesWaitingToBeStoredAreBoundedInAll(t *testing.T) {
	tier := fake(t, 1)
	ts := &tier.slots[0]
	size := tier.layout(64, nil).Bytes
	ts.older = []*lineage{{blocks: []*block{{copied: true, layout: tier.layout(64, nil), payload: make([]byte, catchUpBytes-size)}}}}
	tier.fillCells(0, 256, 0)
	ts.note(Text(tokensFrom(0, 256)), nil)
	current := ts.lineage
	ts.discard(tier, 0)
	for i, b := range current.blocks {
		if b.copied != (i == 0) || b.lost != (i > 0) {
			t.Errorf("block %d: copied=%v lost=%v", i, b.copied, b.lost)
		}
	}
}

func TestCopiesWaitingToBeStoredTakeAShareOfTheMemoryThatIsLeft(t *testing.T) {
	tier := fake(t, 1)
	size := tier.layout(64, nil).Bytes
	tier.memory.available = func() int { return memoryShare * (2*size + 100) }
	tier.memory.held = 100 // restores have these
	tier.fillCells(0, 256, 0)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(0, 256)), nil)
	current := ts.lineage
	ts.discard(tier, 0)
	for i, b := range current.blocks {
		if b.copied != (i < 2) || b.lost != (i >= 2) {
			t.Errorf("block %d: copied=%v lost=%v", i, b.copied, b.lost)
		}
	}
}

func TestForkInheritsTaintOnlyWhenItCopiesTaintedRows(t *testing.T) {
	tier := fake(t, 2)
	tier.slots[0].taint = 50
	tier.BeforeFork(0, 1, 50)
	if tier.slots[1].taint != noTaint {
		t.Error("50 exact rows made the copy tainted")
	}
	tier.BeforeFork(0, 1, 51)
	if tier.slots[1].taint != 50 {
		t.Error("a tainted row was copied as exact")
	}
}

func TestDiscardCopiesWhatIsLostAndLaterContentIsNotMistakenForIt(t *testing.T) {
	tier := fake(t, 1)
	tier.fillCells(0, 200, 0)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(0, 200)), nil)
	ts.lineage.finished = true
	old := ts.lineage

	// first the slot keeps 128 rows: whole blocks 0 and 1 stay in the cells, block 2 and the tail are copied now
	tier.BeforeDiscard(0, 128)
	tier.rows.Drop(0, 128)
	for i, copied := range []bool{false, false, true, true} {
		if old.blocks[i].copied != copied {
			t.Fatalf("block %d copied=%v", i, !copied)
		}
	}
	if got := old.blocks[2].payload[old.blocks[2].layout.Segments[0].Offset]; got != 128 {
		t.Errorf("block 2 holds rows from %d on", got)
	}
	// then all of it goes, before the snapshot ran: they are copied before other content takes the cells
	ts.load(128, 128, 300)
	tier.BeforeDiscard(0, 0)
	for i, b := range old.blocks {
		if !b.copied {
			t.Fatalf("block %d of the older content was lost", i)
		}
		if got := b.payload[b.layout.Segments[0].Offset]; got != byte(64*i) {
			t.Errorf("block %d holds rows from %d on", i, got)
		}
	}
	tier.rows.Drop(0, 0)
	tier.fillCells(0, 200, 77)
	late := &block{first: 0, rows: 64, layout: tier.layout(64, nil), payload: make([]byte, tier.layout(64, nil).Bytes)}
	tier.export(old, late)
	if late.copied || !late.lost {
		t.Error("rows of later content were exported under the older content's key")
	}
}
