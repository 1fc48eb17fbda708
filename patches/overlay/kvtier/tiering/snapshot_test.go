package tiering

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// rewrite gives every row of the cells the same byte, as a batch does that is being computed.
func (t *Tiering) rewrite(cells []int32, with byte) {
	all := bytes.Repeat([]byte{with}, fakeRowBytes*len(cells))
	for segment := range 2 * len(t.model.Layers) {
		t.rows.Write(segment, cells, rows.Chunk{Data: all})
	}
}

func TestSnapshotWaitsForTheBatchesThatComputeItsRows(t *testing.T) {
	tier, store := withSidecar(t, 1, 64, tierpb.Tier_TIER_RAM)
	tier.fillCells(0, 64, 1)
	cells := tier.rows.Cells(0, 0, 64)
	tier.fakeHost().begin(7)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(1000, 1064)), []int{7})
	done := make(chan error, 1)
	go func() { done <- tier.snapshot(ts.lineage) }()
	select {
	case err := <-done:
		t.Fatalf("stored beside a batch that computes the rows: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	tier.rewrite(cells, 77)
	tier.fakeHost().end(7)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if len(store.put) != 1 {
		t.Fatalf("%d blocks were stored", len(store.put))
	}
	file, err := os.ReadFile(store.put[0])
	if err != nil {
		t.Fatal(err)
	}
	payload := file[4096:]
	for segment, s := range tier.layout(64, nil).Segments {
		for i, got := range payload[s.Offset : s.Offset+s.Bytes] {
			if got != 77 {
				t.Fatalf("segment %d, byte %d: %d was stored before the batch had computed it", segment, i, got)
			}
		}
	}
}

func TestWhatIsDiscardedIsCopiedOnlyWhenItsBatchesHaveComputedIt(t *testing.T) {
	tier := fake(t, 1)
	tier.fillCells(0, 64, 1)
	cells := tier.rows.Cells(0, 0, 64)
	tier.fakeHost().begin(7)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(1000, 1064)), []int{7})
	ts.lineage.plan(tier)
	block := ts.lineage.blocks[0]
	done := make(chan struct{})
	go func() {
		tier.host.Lock()
		defer tier.host.Unlock()
		ts.discard(tier, 0)
		close(done)
	}()
	select {
	case <-done:
		t.Fatal("copied beside a batch that computes the rows")
	case <-time.After(100 * time.Millisecond):
	}
	tier.rewrite(cells, 77)
	tier.fakeHost().end(7)
	<-done
	if !block.copied || block.payload[block.layout.Segments[0].Offset] != 77 {
		t.Error("rows were copied before the batch had computed them")
	}
}

func TestNothingIsWrittenThatThereIsNoMemoryFor(t *testing.T) {
	eachBlockApart(t)
	tier, _ := withSidecar(t, 1, 64, tierpb.Tier_TIER_RAM)
	size, asked := tier.layout(64, nil).Bytes, 0
	tier.memory.available = func() int {
		asked++
		if asked > 2 { // the first two blocks have filled the memory
			return memoryShare*size - 1
		}
		return memoryShare * size
	}
	tier.fillCells(0, 256, 1)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(1000, 1256)), nil)
	if err := tier.snapshot(ts.lineage); err != nil {
		t.Fatal(err)
	}
	if ts.lineage.saved != 128 {
		t.Errorf("%d rows are stored", ts.lineage.saved)
	}
	tier.memory.available = func() int { return 1 << 40 }
	if err := tier.snapshot(ts.lineage); err != nil || ts.lineage.saved != 256 {
		t.Errorf("%d rows are stored when there is memory again: %v", ts.lineage.saved, err)
	}
}

func TestAFileOfAnotherSizeThanItsRowsNeedIsNotFilled(t *testing.T) {
	tier, store := withSidecar(t, 1, 64, tierpb.Tier_TIER_RAM)
	store.wrong = 4096
	tier.fillCells(0, 64, 1)
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(1000, 1064)), nil)
	if err := tier.snapshot(ts.lineage); err == nil || ts.lineage.saved != 0 {
		t.Errorf("%d rows are stored: %v", ts.lineage.saved, err)
	}
	if file, err := os.ReadFile(store.put[0]); err != nil || bytes.Count(file, []byte{0}) != len(file) {
		t.Errorf("it was written to: %v", err)
	}
}
