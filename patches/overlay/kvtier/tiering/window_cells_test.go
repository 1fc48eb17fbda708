package tiering

import (
	"bytes"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// freeFrom gives cells from a first one on, and notes what it was asked to avoid.
func freeFrom(first int32, most int, avoided *map[int32]struct{}) func(int, int, map[int32]struct{}) []int32 {
	return func(_, n int, avoid map[int32]struct{}) (cells []int32) {
		*avoided = avoid
		for i := range min(n, most) {
			cells = append(cells, first+int32(i))
		}
		return cells
	}
}

func TestWhereAnyCellsWillDoAWindowComesBackIntoFreeOnes(t *testing.T) {
	tier, store := withWindows(t)
	store.blocks, store.attached = store.blocks[:len(store.blocks)-8], make(map[kvtier.Key][]*tierpb.AttachedBlock)
	var avoided map[int32]struct{}
	for i := range tier.model.Windows {
		w := &tier.model.Windows[i]
		w.Cells, w.FreeCells = 5, freeFrom(300, windowSize, &avoided) // fewer than a block may name
		w.Rows.Occupy(1, 0, []int32{900 - windowTokens + 1, 2, 3})    // another slot has those that they lay in, or that are named
		var others []kvtier.Key
		on := func(number int) kvtier.Key { return store.blocks[number].key }
		for _, part := range windowParts(w, kvtier.TokenBytes(windowPrompt[:windowTokens]), on) {
			part.lieIn(make([]int32, windowSize))
			if part.block.Last {
				part.block.Others = others
			}
			others = append(others, part.block.Key())
			store.addWindow(t, tier, part)
		}
	}
	tier.prefetchFor(t.Context(), windowPrompt)
	if got := tier.restoreFor(0, windowPrompt, 0); got != windowTokens {
		t.Fatalf("resumes at %d", got)
	}
	for _, w := range tier.model.Windows {
		cells := w.Rows.Cells(0, windowTokens-windowSize, windowTokens)
		got := make([]byte, fakeRowBytes*len(cells))
		w.Rows.Read(0, cells, got)
		for i := range cells {
			want := bytes.Repeat([]byte{windowByte(w.Child, windowTokens-windowSize+i, 0)}, fakeRowBytes)
			if cells[i] < 300 || cells[i] >= 300+windowSize || !bytes.Equal(got[fakeRowBytes*i:fakeRowBytes*(i+1)], want) {
				t.Fatalf("window %d: row %d is in cell %d, %v", w.Child, i, cells[i], got[fakeRowBytes*i])
			}
		}
	}
}

func TestWithTooFewFreeCellsAWindowIsComputed(t *testing.T) {
	tier, ts := withPromptEnd(t)
	tier.launch(301)
	var avoided map[int32]struct{}
	f := &fetch{}
	for i := range tier.model.Windows {
		w := &tier.model.Windows[i]
		w.FreeCells = freeFrom(0, 9, &avoided)
		part := windowPart{window: w}
		part.block.Tokens, part.block.Cells = make([]byte, 40), make([]int32, 10)
		f.windows = append(f.windows, &fetchedWindow{windowPart: part})
	}
	if tier.placeWindows(f, 0) {
		t.Error("ten rows have nine cells")
	}
	if _, ok := avoided[500+299]; !ok || ts.lineage.promptEnd.copied {
		t.Error("a cell that is still to be copied is not avoided")
	}
}

func TestTheSameRowsInOtherCellsHaveOneKeyWhereAnyCellsWillDo(t *testing.T) {
	keys := func(free func(int, int, map[int32]struct{}) []int32, first int32) (keys []kvtier.Key) {
		w := &Window{Child: 1, Size: windowSize, Cells: fakeCells, FreeCells: free}
		on := func(int) kvtier.Key { return kvtier.Key{} }
		for _, part := range windowParts(w, kvtier.TokenBytes(tokensFrom(0, windowTokens)), on) {
			cells := make([]int32, part.block.Rows())
			for i := range cells {
				cells[i] = first + int32(i)
			}
			part.lieIn(cells)
			if !slices.Equal(part.cells, cells) {
				t.Fatalf("it lies in %v", part.cells)
			}
			keys = append(keys, part.block.Key())
		}
		return keys
	}
	var avoided map[int32]struct{}
	if anywhere := freeFrom(0, 0, &avoided); !slices.Equal(keys(anywhere, 3), keys(anywhere, 400)) {
		t.Error("the cells are in the key where any will do")
	}
	if slices.Equal(keys(nil, 3), keys(nil, 400)) {
		t.Error("the cells are not in the key")
	}
}
