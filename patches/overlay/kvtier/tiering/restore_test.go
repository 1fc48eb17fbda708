package tiering

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// holds fails unless the slot's positions [from, to) are the stored ones in every segment.
func holds(t *testing.T, tier *Tiering, slot, from, to int) {
	t.Helper()
	cells := tier.rows.Cells(slot, from, to)
	if cells == nil {
		t.Fatalf("positions %d to %d are not in the slot", from, to)
	}
	for segment := range 2 * len(tier.model.Layers) {
		rows := make([]byte, 16*len(cells))
		tier.rows.Read(segment, cells, rows)
		for i, got := range rows {
			if want := storedByte(from+i/16, segment); got != want {
				t.Fatalf("position %d, segment %d: %d, want %d", from+i/16, segment, got, want)
			}
		}
	}
}

// allCells returns every byte of every cell.
func allCells(tier *Tiering) []byte {
	cells := make([]int32, fakeCells)
	for i := range cells {
		cells[i] = int32(i)
	}
	var all []byte
	for segment := range 2 * len(tier.model.Layers) {
		rows := make([]byte, 16*len(cells))
		tier.rows.Read(segment, cells, rows)
		all = append(all, rows...)
	}
	return all
}

// layOut has the cells somewhere else than one after the other in the CPU's memory.
func layOut(tier *Tiering, cells string) {
	planes := tier.rows.(*fakeRows).planes
	switch cells {
	case "on a device":
		tier.model.OnHost = false
		tier.model.Pinned = func(n int) []byte { return bytes.Repeat([]byte{0xAA}, n) }
		for i := range planes {
			planes[i].Tensor = deviceTensor{planes[i].Tensor.(fakeTensor)}
		}
	case "transposed":
		for i := range planes {
			planes[i].Permuted = i%2 == 1 // V
		}
	case "scattered":
		tier.fakeHost().avoid = make(map[int32]struct{})
		for cell := int32(0); cell < fakeCells; cell += 3 {
			tier.fakeHost().avoid[cell] = struct{}{}
		}
	}
}

// deviceTensor is one that the CPU can't access.
type deviceTensor struct{ fakeTensor }

func (deviceTensor) KVTierHost() []byte { return nil }

func TestRestoredRowsAreTheStoredOnesAndTheLastTokenIsComputed(t *testing.T) {
	for _, where := range []tierpb.Tier{tierpb.Tier_TIER_RAM, tierpb.Tier_TIER_LOCAL} {
		for _, cells := range []string{"on the host", "on a device", "transposed", "scattered"} {
			for _, memory := range []int{0, 70} {
				t.Run(fmt.Sprintf("%v,%s,memory=%d", where, cells, memory), func(t *testing.T) {
					tier, _ := withSidecar(t, 1, 3*64, where)
					layOut(tier, cells)
					prompt := tokensFrom(0, 3*64) // all of it is stored, to the last token
					if memory > 0 {
						tier.fillCells(0, memory, 0)
					}
					f := tier.prefetchFor(t.Context(), prompt)
					if f == nil || f.rows != 3*64-1 {
						t.Fatalf("fetched %+v: the last token is to be computed", f)
					}
					if got := tier.restoreFor(0, prompt, memory); got != 3*64-1 {
						t.Fatalf("resumes at %d", got)
					}
					holds(t, tier, 0, memory, 3*64-1)
				})
			}
		}
	}
}

func TestDamageOnTheDiskIsFoundAndEndsTheMatch(t *testing.T) {
	tier, store := withSidecar(t, 1, 3*64, tierpb.Tier_TIER_LOCAL)
	store.change(t, tier, 1, 63, 3)
	prompt := tokensFrom(0, 300)
	if f := tier.prefetchFor(t.Context(), prompt); f == nil || f.rows != 64 {
		t.Fatalf("fetched %+v", f)
	}
	store.wasReported(t, 1)
	if got := tier.restoreFor(0, prompt, 0); got != 64 {
		t.Fatalf("resumes at %d", got)
	}
	holds(t, tier, 0, 0, 64)
}

// What was right in a file of the RAM tier when it was opened may be changed before it is read.
func TestAByteThatChangesBeforeTheCopyIsNotRestored(t *testing.T) {
	for _, c := range []struct {
		name                string
		block, row, segment int
		memory, least, rows int // rows in the slot before, fewest worth restoring, position to resume from
		cut, twoDamagedAt   bool
		cells               string
	}{
		{name: "first block", block: 0, row: 5, segment: 0},
		{name: "middle block, K", block: 1, row: 0, segment: 2, rows: 64},
		{name: "middle block, V", block: 1, row: 63, segment: 3, rows: 64},
		{name: "row that is not copied", block: 2, row: 63, segment: 1, rows: 128},
		{name: "block that is in memory in part", block: 1, row: 2, segment: 0, memory: 70, rows: 70},
		{name: "what is left is not worth it", block: 1, row: 0, segment: 0, least: 65},
		{name: "two of them", block: 1, row: 7, segment: 1, rows: 64, twoDamagedAt: true},
		{name: "memory of a device", block: 1, row: 7, segment: 1, rows: 64, cells: "on a device"},
		{name: "V that is transposed", block: 1, row: 7, segment: 1, rows: 64, cells: "transposed"},
		{name: "cells here and there", block: 1, row: 7, segment: 1, rows: 64, cells: "scattered"},
		{name: "file cut short", block: 1, rows: 64, cut: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			tier, store := withSidecar(t, 1, 3*64, tierpb.Tier_TIER_RAM)
			layOut(tier, c.cells)
			tier.config.MinTokens = max(1, c.least)
			prompt := tokensFrom(0, 3*64)
			if c.memory > 0 {
				tier.fillCells(0, c.memory, 0)
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
				holds(t, tier, 0, c.memory, c.rows)
			}
			if tier.rows.Cells(0, c.rows, c.rows+1) != nil {
				t.Error("a row of the damaged block is in the slot")
			}
			if wrong := storedByte(64*c.block+c.row, c.segment) ^ 1; !c.cut && bytes.Contains(allCells(tier), append([]byte{wrong}, bytes.Repeat([]byte{wrong ^ 1}, 15)...)) {
				t.Error("a damaged row was written to a cell")
			}
			store.wasReported(t, c.block)
		})
	}
}

func TestRestoreWaitsUntilNoBatchIsBeingComputed(t *testing.T) {
	tier := withSidecarOnly(t, 2*64)
	prompt := tokensFrom(0, 200)
	if tier.prefetchFor(t.Context(), prompt) == nil {
		t.Fatal("nothing fetched")
	}
	host := tier.fakeHost()
	before := allCells(tier)
	host.begin(1)
	host.restores = func() {
		if host.TryLock() {
			t.Error("the runner's lock is not held")
		}
	}
	resumed := make(chan int, 1)
	go func() { resumed <- tier.restoreFor(0, prompt, 0) }()
	select {
	case got := <-resumed:
		t.Fatalf("restored %d rows beside a batch that is being computed", got)
	case <-time.After(100 * time.Millisecond):
	}
	if !bytes.Equal(before, allCells(tier)) {
		t.Error("a cell was written beside a batch that is being computed")
	}
	host.end(1)
	if got := <-resumed; got != 128 || host.quiesced != 1 {
		t.Errorf("resumes at %d, waited %d times for the devices", got, host.quiesced)
	}
}

func TestRestoreAvoidsPendingCells(t *testing.T) {
	tier := withSidecarOnly(t, 64+10)
	tier.fakeHost().avoid = map[int32]struct{}{2: {}, 3: {}}
	prompt := tokensFrom(0, 64+11)
	if tier.prefetchFor(t.Context(), prompt) == nil {
		t.Fatal("nothing fetched")
	}
	if n := tier.fakeHost().awaited; n != 1 {
		t.Errorf("waited %d times for what was built before", n)
	}
	if got := tier.restoreFor(0, prompt, 0); got != 64+10 {
		t.Fatalf("resumes at %d", got)
	}
	if cells := tier.rows.Cells(0, 0, 64+10); slices.Contains(cells, 2) || slices.Contains(cells, 3) {
		t.Errorf("pending cells are used: %v", cells[:8])
	}
	holds(t, tier, 0, 0, 64+10)
	if len(tier.lookUps.of) != 0 {
		t.Error("the look-up is kept")
	}
}

func TestRestoreThatLeavesAGapIsTakenBack(t *testing.T) {
	tier := withSidecarOnly(t, 2*64)
	prompt := tokensFrom(0, 200)
	tier.fillCells(0, 20, 0)
	tier.rows = gapped{tier.rows.(*fakeRows)}
	if tier.prefetchFor(t.Context(), prompt) == nil {
		t.Fatal("nothing fetched")
	}
	if got := tier.restoreFor(0, prompt, 20); got != 20 {
		t.Errorf("resumes at %d", got)
	}
	if tier.rows.Cells(0, 0, 20) == nil || tier.rows.Cells(0, 20, 21) != nil {
		t.Error("the slot is not what it was")
	}
}

// gapped marks one cell less than it is told to.
type gapped struct{ *fakeRows }

func (r gapped) Occupy(slot, from int, cells []int32) {
	r.fakeRows.Occupy(slot, from, cells[:len(cells)-1])
}

func TestPanicWhileRestoringLeavesTheSlotAsItWas(t *testing.T) {
	tier := withSidecarOnly(t, 2*64)
	prompt := tokensFrom(0, 200)
	tier.fillCells(0, 20, 0)
	if tier.prefetchFor(t.Context(), prompt) == nil {
		t.Fatal("nothing fetched")
	}
	tier.slots[0].lineage = nil // any use after the rows are in their cells panics
	if got := tier.restoreFor(0, prompt, 20); got != 20 {
		t.Errorf("resumes at %d", got)
	}
	if tier.rows.Cells(0, 0, 20) == nil || tier.rows.Cells(0, 20, 21) != nil {
		t.Error("the slot is not what it was")
	}
	if Active() != nil {
		t.Error("tiering is still on")
	}
}

func TestNothingIsRestoredOnTopOfTaintedRows(t *testing.T) {
	for taint, want := range map[int]int{19: 20, 20: 128} {
		tier, _ := withSidecar(t, 1, 2*64, tierpb.Tier_TIER_RAM)
		prompt := tokensFrom(0, 200)
		tier.fillCells(0, 20, 0)
		tier.slots[0].taint = taint
		if tier.prefetchFor(t.Context(), prompt) == nil {
			t.Fatal("nothing fetched")
		}
		if got := tier.restoreFor(0, prompt, 20); got != want {
			t.Errorf("taint at %d: resumes at %d, want %d", taint, got, want)
		}
	}
}

func TestTheFirstDamagedBlockCountsWhicheverIsFoundFirst(t *testing.T) {
	c := &rowCopy{good: 9}
	for _, block := range []int{5, 2, 4} {
		c.damaged(block, fmt.Errorf("block %d", block))
	}
	if c.undamaged() != 2 || c.damage.Error() != "block 2" {
		t.Errorf("%d blocks are undamaged, then %v", c.undamaged(), c.damage)
	}
}

// A read that fails has filled some of the cells by then, with bytes that nothing can be said of.
func TestWhatCouldNotBeCheckedDoesNotStayInItsCells(t *testing.T) {
	tier, store := withSidecar(t, 1, 3*64, tierpb.Tier_TIER_RAM)
	prompt := tokensFrom(0, 3*64)
	if tier.prefetchFor(t.Context(), prompt) == nil {
		t.Fatal("nothing fetched")
	}
	span := tier.layout(64, nil).Segments[2]
	if err := os.Truncate(store.blocks[1].path, int64(span.Offset+40*span.RowBytes)); err != nil {
		t.Fatal(err)
	}
	if got := tier.restoreFor(0, prompt, 0); got != 64 {
		t.Fatalf("resumes at %d", got)
	}
	holds(t, tier, 0, 0, 64)
	for _, row := range []int{0, 39, 40} {
		got := make([]byte, fakeRowBytes)
		tier.rows.Read(2, []int32{int32(64 + row)}, got) // cells are taken in order
		if !bytes.Equal(got, make([]byte, fakeRowBytes)) {
			t.Errorf("row %d is in its cell: %v", row, got)
		}
	}
}

func TestABlockTooManyToBeOpenIsReadIntoMemory(t *testing.T) {
	tier, store := withSidecar(t, 1, 3*64, tierpb.Tier_TIER_RAM)
	size, opened := store.blocks[0].size, 0
	var mu sync.Mutex
	open := tier.files.open
	tier.files.open = func(path string, size int) (*kvtier.File, error) {
		mu.Lock()
		defer mu.Unlock()
		if opened++; opened > 1 {
			return nil, kvtier.ErrManyOpen
		}
		return open(path, size)
	}
	prompt := tokensFrom(0, 3*64+1)
	f := tier.prefetchFor(t.Context(), prompt)
	if f == nil || f.rows != 3*64 || privateBytes(f) != 2*size || tier.memory.held != 2*size {
		t.Fatalf("fetched %+v, %d bytes are held", f, tier.memory.held)
	}
	if got := tier.restoreFor(0, prompt, 0); got != 3*64 {
		t.Fatalf("resumes at %d", got)
	}
	holds(t, tier, 0, 0, 3*64)

	tier.memory.available = func() int { return 0 }
	l := tier.prefetch(t.Context(), Text(prompt), len(prompt), func() (slot, rows int) { return 0, 0 })
	if l.fetch != nil || l.short.reason != noMemory {
		t.Errorf("without memory: fetched %+v, %v", l.fetch, l.short)
	}
}

func TestAPanicOfAReaderIsAMissAndKeepsNoMemory(t *testing.T) {
	tier, _ := withSidecar(t, 1, 3*64, tierpb.Tier_TIER_LOCAL)
	read := tier.files.read
	tier.files.read = func(path string, size int) (*kvtier.File, error) {
		if strings.HasSuffix(path, "/64") {
			panic("for the test")
		}
		return read(path, size)
	}
	prompt := tokensFrom(0, 3*64+1)
	f := tier.prefetchFor(t.Context(), prompt)
	if f == nil || f.rows != 64 {
		t.Fatalf("fetched %+v", f)
	}
	f.close()
	if tier.memory.held != 0 {
		t.Errorf("%d bytes are held by nobody", tier.memory.held)
	}
}
