package ollamarunner

import (
	"bytes"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// tierHolds fails unless the slot's positions [from, to) are the stored ones in every segment.
func tierHolds(t *testing.T, tier *kvTier, slot, from, to int) {
	t.Helper()
	cells := tier.cache.KVTierCells(slot, int32(from), int32(to))
	if cells == nil {
		t.Fatalf("positions %d to %d are not in the slot", from, to)
	}
	for segment := range 2 * len(tier.layers) {
		rows := make([]byte, 16*len(cells))
		tier.cache.KVTierPlane(tier.layers[segment/2].Layer, segment%2 == 1).Read(cells, rows)
		for i, got := range rows {
			if want := tierStoredByte(from+i/16, segment); got != want {
				t.Fatalf("position %d, segment %d: %d, want %d", from+i/16, segment, got, want)
			}
		}
	}
}

// tierCells returns every byte of every cell.
func tierCells(tier *kvTier) []byte {
	cells := make([]int32, tierFakeCtx)
	for i := range cells {
		cells[i] = int32(i)
	}
	var all []byte
	for segment := range 2 * len(tier.layers) {
		rows := make([]byte, 16*len(cells))
		tier.cache.KVTierPlane(tier.layers[segment/2].Layer, segment%2 == 1).Read(cells, rows)
		all = append(all, rows...)
	}
	return all
}

func TestTierRestoredRowsAreTheStoredOnesAndTheLastTokenIsComputed(t *testing.T) {
	for _, where := range []tierpb.Tier{tierpb.Tier_TIER_RAM, tierpb.Tier_TIER_LOCAL} {
		for _, device := range []bool{false, true} {
			for _, memory := range []int{0, 70} {
				t.Run(fmt.Sprintf("%v,device=%v,memory=%d", where, device, memory), func(t *testing.T) {
					tierFakeDevice = device
					t.Cleanup(func() { tierFakeDevice = false })
					tier, _ := tierStored(t, 1, 3*64, where)
					tier.onHost = !device
					prompt := tierInputs(0, 3*64) // all of it is stored, to the last token
					if memory > 0 {
						tier.fillSlot(0, prompt[:memory], 0)
					}
					f := tier.prefetchFor(t.Context(), prompt)
					if f == nil || f.rows != 3*64-1 {
						t.Fatalf("fetched %+v: the last token is to be computed", f)
					}
					if got := tier.restoreFor(0, prompt, memory); got != 3*64-1 {
						t.Fatalf("resumes at %d", got)
					}
					tierHolds(t, tier, 0, memory, 3*64-1)
				})
			}
		}
	}
}

func TestTierDamageOnTheDiskIsFoundAndEndsTheMatch(t *testing.T) {
	tier, store := tierStored(t, 1, 3*64, tierpb.Tier_TIER_LOCAL)
	store.change(t, tier, 1, 63, 3)
	prompt := tierInputs(0, 300)
	if f := tier.prefetchFor(t.Context(), prompt); f == nil || f.rows != 64 {
		t.Fatalf("fetched %+v", f)
	}
	store.wasReported(t, 1)
	if got := tier.restoreFor(0, prompt, 0); got != 64 {
		t.Fatalf("resumes at %d", got)
	}
	tierHolds(t, tier, 0, 0, 64)
}

// A file of the RAM tier is mapped: what was right when it was opened may be changed before it is copied.
func TestTierAByteThatChangesBeforeTheCopyIsNotRestored(t *testing.T) {
	for _, c := range []struct {
		name                 string
		block, row, segment  int
		memory, least, rows  int // rows in the slot before, fewest worth restoring, position to resume from
		cut                  bool
		device, twoDamagedAt bool
	}{
		{name: "first block", block: 0, row: 5, segment: 0},
		{name: "middle block, K", block: 1, row: 0, segment: 2, rows: 64},
		{name: "middle block, V", block: 1, row: 63, segment: 3, rows: 64},
		{name: "row that is not copied", block: 2, row: 63, segment: 1, rows: 128},
		{name: "block that is in memory in part", block: 1, row: 2, segment: 0, memory: 70, rows: 70},
		{name: "what is left is not worth it", block: 1, row: 0, segment: 0, least: 65},
		{name: "two of them", block: 1, row: 7, segment: 1, rows: 64, twoDamagedAt: true},
		{name: "memory of a device", block: 1, row: 7, segment: 1, rows: 64, device: true},
		{name: "file cut short", block: 1, rows: 64, cut: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			tierFakeDevice = c.device
			t.Cleanup(func() { tierFakeDevice = false })
			tier, store := tierStored(t, 1, 3*64, tierpb.Tier_TIER_RAM)
			tier.onHost = !c.device
			tier.config.MinTokens = max(1, c.least)
			prompt := tierInputs(0, 3*64)
			if c.memory > 0 {
				tier.fillSlot(0, prompt[:c.memory], 0)
			}
			if f := tier.prefetchFor(t.Context(), prompt); f == nil || f.rows != 3*64-1 {
				t.Fatalf("fetched %+v", f)
			}
			if c.cut {
				if err := os.Truncate(store.blocks[c.block].path, 4096); err != nil {
					t.Fatal(err)
				}
			} else {
				store.change(t, tier, c.block, c.row, c.segment)
			}
			if c.twoDamagedAt {
				store.change(t, tier, 2, 0, 0)
			}
			if got := tier.restoreFor(0, prompt, c.memory); got != c.rows {
				t.Fatalf("resumes at %d, want %d", got, c.rows)
			}
			if c.rows > c.memory {
				tierHolds(t, tier, 0, c.memory, c.rows)
			}
			if tier.cache.KVTierCells(0, int32(c.rows), int32(c.rows+1)) != nil {
				t.Error("a row of the damaged block is in the slot")
			}
			if wrong := tierStoredByte(64*c.block+c.row, c.segment) ^ 1; !c.cut && bytes.Contains(tierCells(tier), append([]byte{wrong}, bytes.Repeat([]byte{wrong ^ 1}, 15)...)) {
				t.Error("a damaged row was written to a cell")
			}
			store.wasReported(t, c.block)
		})
	}
}

func TestTierRestoreWaitsUntilNoBatchIsBeingComputed(t *testing.T) {
	tier, _ := tierStored(t, 1, 2*64, tierpb.Tier_TIER_RAM)
	prompt := tierInputs(0, 200)
	if tier.prefetchFor(t.Context(), prompt) == nil {
		t.Fatal("nothing fetched")
	}
	computing, synced := true, 0
	tier.sync = func() {
		if computing {
			t.Error("waited for the devices before the batch had ended")
		}
		synced++
	}
	tier.batches.built(1, []int32{900})
	tier.batches.begin(1)
	resumed := make(chan int, 1)
	go func() { resumed <- tier.restoreFor(0, prompt, 0) }()
	select {
	case got := <-resumed:
		t.Fatalf("restored %d rows beside a batch that is being computed", got)
	case <-time.After(100 * time.Millisecond):
	}
	computing = false
	tier.batches.end(1)
	if got := <-resumed; got != 128 || synced != 1 {
		t.Errorf("resumes at %d, waited %d times for the devices", got, synced)
	}
}

func TestTierNothingIsRestoredOnTopOfTaintedRows(t *testing.T) {
	for taint, want := range map[int32]int{19: 20, 20: 128} {
		tier, _ := tierStored(t, 1, 2*64, tierpb.Tier_TIER_RAM)
		prompt := tierInputs(0, 200)
		tier.fillSlot(0, prompt[:20], 0)
		tier.slots[0].taint = taint
		if tier.prefetchFor(t.Context(), prompt) == nil {
			t.Fatal("nothing fetched")
		}
		if got := tier.restoreFor(0, prompt, 20); got != want {
			t.Errorf("taint at %d: resumes at %d, want %d", taint, got, want)
		}
	}
}

func TestTierTheFirstDamagedBlockCountsWhicheverIsFoundFirst(t *testing.T) {
	c := &tierCopy{good: 9}
	for _, block := range []int{5, 2, 4} {
		c.damaged(block, fmt.Errorf("block %d", block))
	}
	if c.undamaged() != 2 || c.damage.Error() != "block 2" {
		t.Errorf("%d blocks are undamaged, then %v", c.undamaged(), c.damage)
	}
}
