package kvcache

import (
	"bytes"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier/rows"
)

func TestKVTierAWindowHasRowsAndCellsOfItsOwn(t *testing.T) {
	window, full, empty := tierTestCache(false, true), tierTestCache(false, true), tierTestCache(false, true)
	for _, c := range []*Causal{window, empty} {
		c.swaWindowSize, c.swaMemorySize = 8, 9
		c.cells = c.cells[:20]
		c.tierLocs = []int32{3}
	}
	clear(empty.keys)
	clear(empty.values)
	full.tierLocs = []int32{30}
	cache := tierTestOf(t, window, full, empty)
	windows := cache.Windows()
	if len(windows) != 1 || windows[0].Child != 0 || windows[0].Size != 9 || windows[0].Still != 8 || windows[0].Cells != 20 {
		t.Fatalf("windows %+v", windows)
	}
	if layers := cache.Layers(); len(layers) != 4 || !layers[0].Drops || layers[2].Drops {
		t.Errorf("layers %+v", layers)
	}
	if got := cache.BatchCells(); !slices.Equal(got, []int32{30}) {
		t.Errorf("cells of the batch %v", got)
	}
	if got := windows[0].BatchCells(); !slices.Equal(got, []int32{3}) {
		t.Errorf("cells of the batch in the window %v", got)
	}
	if n := len(cache.Rows().planes); n != 4 {
		t.Errorf("%d segments of the layers that keep every row", n)
	}
	r := windows[0].Rows
	r.Write(0, []int32{5}, rows.Chunk{Data: bytes.Repeat([]byte{7}, 24)})
	r.Occupy(1, 40, []int32{5, 6})
	if got := window.tierTestElement(0, false, 5, 0, 0); got[0] != 7 || full.tierTestElement(0, false, 5, 0, 0)[0] == 7 {
		t.Error("a row of the window is in another cache")
	}
	if full.tierCells(1, 40, 42) != nil || !slices.Equal(window.tierCells(1, 40, 42), []int32{5, 6}) {
		t.Error("cells of the window are taken in another cache")
	}
	for name, c := range map[string]struct {
		slot  int
		cells []int32
		avoid map[int32]struct{}
		free  bool
	}{
		"free":          {0, []int32{1, 2}, nil, true},
		"its own":       {1, []int32{5, 6, 7}, nil, true},
		"another's":     {0, []int32{4, 5}, nil, false},
		"pending":       {0, []int32{1, 2}, map[int32]struct{}{2: {}}, false},
		"the same one":  {0, []int32{1, 1}, nil, false},
		"there is none": {0, []int32{20}, nil, false},
	} {
		if got := r.Free(c.slot, c.cells, c.avoid); got != c.free {
			t.Errorf("%s: free %v", name, got)
		}
	}
}

func TestKVTierAWindowIsWhatStockStillHasWhenASequenceHasEnded(t *testing.T) {
	for memory, want := range map[int32]int{8: 8, 9: 8, 10: 10, 4096: 4096} {
		c := &Causal{swaWindowSize: 8, swaMemorySize: memory}
		if got := c.tierKeeps(); got != want {
			t.Errorf("of %d rows %d are a window", memory, got)
		}
	}
}
