package ollamarunner

import (
	"os"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// rewrite gives every row of the cells the same byte, as a batch does that is being computed.
func (t *kvTier) rewrite(cells []int32, with byte) {
	all := make([]byte, 16*len(cells))
	for i := range all {
		all[i] = with
	}
	for segment := range 2 * len(t.layers) {
		t.cache.KVTierPlane(t.layers[segment/2].Layer, segment%2 == 1).Write(cells, rows.Chunk{Data: all})
	}
}

func TestTierSnapshotWaitsForTheBatchesThatComputeItsRows(t *testing.T) {
	tier, store := tierStored(t, 1, 64, tierpb.Tier_TIER_RAM)
	tier.fillSlot(0, tierInputs(1000, 1064), 1)
	cells := tier.cache.KVTierCells(0, 0, 64)
	tier.batches.built(7, nil)
	tier.batches.begin(7)
	ts := &tier.slots[0]
	ts.note(tier.server.cache.slots[0].Inputs, []int{7})
	done := make(chan error, 1)
	go func() { done <- tier.snapshot(ts.lineage) }()
	select {
	case err := <-done:
		t.Fatalf("stored beside a batch that computes the rows: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	tier.rewrite(cells, 77)
	tier.batches.end(7)
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
	block, err := kvtier.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	for segment := range 2 * len(tier.layers) {
		for i, got := range block.Segment(segment) {
			if got != 77 {
				t.Fatalf("segment %d, byte %d: %d was stored before the batch had computed it", segment, i, got)
			}
		}
	}
}

func TestTierWhatIsDiscardedIsCopiedOnlyWhenItsBatchesHaveComputedIt(t *testing.T) {
	tier := tierFake(t, 1)
	tier.fillSlot(0, tierInputs(0, 64), 1)
	cells := tier.cache.KVTierCells(0, 0, 64)
	tier.batches.built(7, nil)
	tier.batches.begin(7)
	ts := &tier.slots[0]
	ts.note(tier.server.cache.slots[0].Inputs, []int{7})
	ts.lineage.plan(tier)
	block := ts.lineage.blocks[0]
	done := make(chan struct{})
	go func() {
		tier.server.mu.Lock()
		defer tier.server.mu.Unlock()
		ts.discard(tier, 0)
		close(done)
	}()
	select {
	case <-done:
		t.Fatal("copied beside a batch that computes the rows")
	case <-time.After(100 * time.Millisecond):
	}
	tier.rewrite(cells, 77)
	tier.batches.end(7)
	<-done
	if !block.copied || block.file[block.layout.Segments[0].Offset] != 77 {
		t.Error("rows were copied before the batch had computed them")
	}
}
