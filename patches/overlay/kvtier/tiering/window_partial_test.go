package tiering

import (
	"bytes"
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// inCellsOf fails unless the slot's positions [from, to) of a window have nothing but n in every byte.
func inCellsOf(t *testing.T, w Window, slot, from, to int, n byte) {
	t.Helper()
	cells := w.Rows.Cells(slot, from, to)
	if cells == nil {
		t.Fatalf("window %d: positions %d to %d are not in the slot", w.Child, from, to)
	}
	got := make([]byte, fakeRowBytes*len(cells))
	for segment := range 2 {
		w.Rows.Read(segment, cells, got)
		if !bytes.Equal(got, bytes.Repeat([]byte{n}, len(got))) {
			t.Fatalf("window %d: segment %d is not what it was", w.Child, segment)
		}
	}
}

// untouched fails unless nothing was ever written to the cells of a window, whoever they belong to.
func untouched(t *testing.T, w Window) {
	t.Helper()
	for segment, plane := range w.Rows.(fakeWindowRows).planes {
		if bytes.ContainsFunc(plane.Tensor.KVTierHost(), func(r rune) bool { return r != 0 }) {
			t.Errorf("window %d: something lies in cells of segment %d", w.Child, segment)
		}
	}
}

func TestADamagedBlockOfTheChainBringsNoWindowBack(t *testing.T) {
	tier, store := withWindows(t)
	store.change(t, tier, 3, 5, 1)
	l := tier.prefetch(context.Background(), Text(windowPrompt), len(windowPrompt), tier.held0)
	if l.fetch != nil || l.short.reason != damaged {
		t.Errorf("something was fetched, or %v", l.short)
	}
	store.wasReported(t, 3)
	if got := tier.restoreFor(0, windowPrompt, 0); got != 0 {
		t.Errorf("resumes at %d", got)
	}
	for _, w := range tier.model.Windows {
		untouched(t, w)
	}
	if tier.memory.held != 0 {
		t.Errorf("%d bytes are held by nobody", tier.memory.held)
	}
}

func TestOfAModelWithWindowsNothingComesBackInPart(t *testing.T) {
	const memory, own = 70, 99
	tier, store := withWindows(t)
	store.tier, store.read = tierpb.Tier_TIER_RAM, tierpb.Tier_TIER_RAM
	tier.fillCells(0, memory, 1)
	for _, w := range tier.model.Windows {
		cells := make([]int32, memory)
		for i := range cells {
			cells[i] = int32(i)
		}
		fillWindow(w, cells, own)
		w.Rows.Occupy(0, 0, cells)
	}
	if f := tier.prefetchFor(t.Context(), windowPrompt); f == nil || f.rows != windowTokens {
		t.Fatal("not all was fetched")
	}
	store.change(t, tier, 4, 7, 2) // after it was looked at, before it is read
	if got := tier.restoreFor(0, windowPrompt, memory); got != memory {
		t.Fatalf("resumes at %d", got)
	}
	if tier.rows.Cells(0, 0, memory) == nil || tier.rows.Cells(0, memory, memory+1) != nil {
		t.Error("the slot has not what it had")
	}
	for _, w := range tier.model.Windows {
		inCellsOf(t, w, 0, 0, memory, own)
		if w.Rows.Cells(0, windowTokens-1, windowTokens) != nil {
			t.Errorf("window %d: the end of what did not come back is there", w.Child)
		}
	}
	store.wasReported(t, 4)
}

func TestRowsWithoutAllOfTheirWindowsAreTakenAwayAgain(t *testing.T) {
	for missing := range 8 { // of two windows in four blocks each
		tier, _ := withWindows(t)
		f := tier.prefetchFor(t.Context(), windowPrompt)
		if f == nil || len(f.windows) != 8 {
			t.Fatal("not all was fetched")
		}
		f.windows[missing].close()
		f.windows = append(f.windows[:missing:missing], f.windows[missing+1:]...)
		if got := tier.restoreFor(0, windowPrompt, 0); got != 0 {
			t.Errorf("without block %d: resumes at %d", missing, got)
		}
		for _, w := range tier.model.Windows {
			for at := range windowTokens {
				if w.Rows.Cells(0, at, at+1) != nil {
					t.Fatalf("without block %d: window %d still has row %d", missing, w.Child, at)
				}
			}
		}
		if tier.rows.Cells(0, 0, 1) != nil {
			t.Errorf("without block %d: the slot has rows", missing)
		}
	}
}

func TestNoByteOfADamagedWindowReachesItsCells(t *testing.T) {
	for _, states := range []bool{false, true} {
		tier, store := withWindows(t)
		if states {
			for i := range tier.model.Windows {
				tier.model.Windows[i].Checkpoints = func(int) []int { return nil }
			}
		}
		for _, b := range store.blocks {
			if strings.HasSuffix(b.path, "window-2-320") {
				content, err := os.ReadFile(b.path)
				if err != nil {
					t.Fatal(err)
				}
				for i := len(content) - 4096; i < len(content)-4000; i++ {
					content[i] = 0x7e // a NaN, as f16
				}
				if err := os.WriteFile(b.path, content, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
		if l := tier.prefetch(context.Background(), Text(windowPrompt), len(windowPrompt), tier.held0); l.fetch != nil {
			t.Error("something was fetched")
		}
		if got := tier.restoreFor(0, windowPrompt, 0); got != 0 {
			t.Errorf("resumes at %d", got)
		}
		for _, w := range tier.model.Windows {
			untouched(t, w)
		}
	}
}

// withContent has a finished content of 300 tokens in slot 0, whose windows lie in cells 500 on and have n in every byte. It returns
// the content, planned.
func withContent(t *testing.T, n byte) (*Tiering, *lineage) {
	t.Helper()
	tier, _ := withWindows(t)
	tier.fillCells(0, 300, 1)
	for _, w := range tier.model.Windows {
		cells := cellsFrom(500, windowSize)
		fillWindow(w, cells, n)
		w.Rows.Occupy(0, 300-windowSize, cells)
	}
	ts := &tier.slots[0]
	ts.note(Text(tokensFrom(1000, 1300)), nil)
	ts.lineage.finished = true
	ts.lineage.plan(tier)
	if windowBlocks(tier, ts.lineage) == 0 {
		t.Fatal("no window is to be stored")
	}
	return tier, ts.lineage
}

func cellsFrom(first int32, n int) (cells []int32) {
	for i := range int32(n) {
		cells = append(cells, first+i)
	}
	return cells
}

func TestAWindowIsNotStoredOnceItsSlotHasGoneOn(t *testing.T) {
	for name, c := range map[string]struct {
		goOn   func(*Tiering, *lineage)
		stored bool
	}{
		"it has not": {func(*Tiering, *lineage) {}, true},
		"another content has the same positions in the same cells": {func(tier *Tiering, l *lineage) {
			ts := &tier.slots[0]
			ts.older, ts.lineage = append(ts.older, l), newLineage(0)
			tier.undo(0, 0)
			for _, w := range tier.model.Windows {
				fillWindow(w, cellsFrom(500, windowSize), 7)
				w.Rows.Occupy(0, 300-windowSize, cellsFrom(500, windowSize))
			}
		}, false},
		"its rows are in other cells": {func(tier *Tiering, _ *lineage) {
			for _, w := range tier.model.Windows {
				w.Rows.Drop(0, 0)
				fillWindow(w, cellsFrom(200, windowSize), 7)
				w.Rows.Occupy(0, 300-windowSize, cellsFrom(200, windowSize))
			}
		}, false},
		"its rows are gone": {func(tier *Tiering, _ *lineage) {
			for _, w := range tier.model.Windows {
				w.Rows.Drop(0, 0)
			}
		}, false},
	} {
		tier, l := withContent(t, 42)
		c.goOn(tier, l)
		for _, b := range l.blocks {
			if b.part == nil {
				continue
			}
			b.payload = make([]byte, b.layout.Bytes)
			tier.export(l, b)
			if b.copied != c.stored || b.lost == c.stored {
				t.Errorf("%s: copied %v, lost %v", name, b.copied, b.lost)
			}
			for _, s := range b.layout.Segments {
				if c.stored && !bytes.Equal(b.payload[s.Offset:s.Offset+s.Bytes], bytes.Repeat([]byte{42}, s.Bytes)) {
					t.Errorf("%s: other rows are stored", name)
				}
			}
		}
	}
}

func TestNothingIsStoredBehindTheLastCheckpoint(t *testing.T) {
	for _, c := range []struct {
		checkpoints []int
		rows        int   // that are stored
		states      []int // where states are
	}{{nil, 0, nil}, {[]int{100}, 100, []int{100}}, {[]int{64, 192}, 192, []int{64, 192}}, {[]int{128, 400}, 128, []int{128}}, {[]int{300}, 300, []int{300}}} {
		tier := fake(t, 1)
		states := newFakeRows(2)
		tier.model.Windows = []Window{{
			Child: 1, Size: 1, Cells: fakeCells, DType: "f32", Rows: fakeWindowRows{states}, Checkpoints: func(int) []int { return c.checkpoints },
			Layers: []kvtier.Layer{{Child: 1, Kind: "state", KRowBytes: fakeRowBytes, VRowBytes: fakeRowBytes}},
		}}
		for i, at := range c.checkpoints {
			states.Occupy(0, at-1, []int32{int32(i)})
		}
		tier.fillCells(0, 300, 1)
		ts := &tier.slots[0]
		ts.note(Text(tokensFrom(0, 300)), nil)
		ts.lineage.finished = true
		ts.lineage.plan(tier)
		rows, ends := 0, []int(nil)
		for _, b := range ts.lineage.blocks {
			if b.part != nil {
				ends = append(ends, b.part.block.Position+b.rows)
			} else {
				rows = max(rows, b.first+b.rows)
			}
		}
		if rows != c.rows || !slices.Equal(ends, c.states) {
			t.Errorf("checkpoints at %v: %d rows are stored, states at %v", c.checkpoints, rows, ends)
		}
	}
}
