package llamarunner

import (
	"bytes"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier/rows"
)

// fakeCells stands for a llama.Context of one or two caches; a sequence takes the lowest cells of its own stream.
type fakeCells struct {
	held    []map[int]map[int32]int32 // cache -> sequence -> cell -> position
	find    func(child, from, n int) []int32
	refuses int // the cache that takes no cells, -1 for none
	asked   int
}

func newFakeCells(children int, positions map[int]int) *fakeCells {
	f := &fakeCells{refuses: -1}
	for range children {
		held := map[int]map[int32]int32{}
		for seq, n := range positions {
			held[seq] = map[int32]int32{}
			for i := range n {
				held[seq][int32(i)] = int32(i)
			}
		}
		f.held = append(f.held, held)
	}
	f.find = func(_, from, n int) []int32 { return numbers(from, n) }
	return f
}

func numbers(from, n int) []int32 {
	found := make([]int32, n)
	for i := range found {
		found[i] = int32(from + i)
	}
	return found
}

func (f *fakeCells) KVTierCells(child, seq, size int) (cells, positions []int32) {
	f.asked++
	for cell := range int32(size) {
		if position, ok := f.held[child][seq][cell]; ok {
			cells, positions = append(cells, cell), append(positions, position)
		}
	}
	if cells == nil {
		return []int32{}, []int32{}
	}
	return cells, positions
}

func (f *fakeCells) KVTierFind(child, _, from, n int) []int32 { return f.find(child, from, n) }

func (f *fakeCells) KVTierOccupy(child, seq, from int, cells []int32) bool {
	if child == f.refuses {
		return false
	}
	for i, cell := range cells {
		f.held[child][seq][cell] = int32(from + i)
	}
	return true
}

func (f *fakeCells) KvCacheSeqRm(seq, from, _ int) bool {
	for _, held := range f.held {
		for cell, position := range held[seq] {
			if int(position) >= from {
				delete(held[seq], cell)
			}
		}
	}
	return true
}

const testSize = 16 // cells of a stream

func testRows(f *fakeCells, streams int) *tierRows {
	return &tierRows{context: f, children: len(f.held), streams: streams, size: testSize, held: map[int][]int32{}, shifted: map[int]bool{}}
}

func TestTierCellsAreNumberedThroughTheStreams(t *testing.T) {
	r := testRows(newFakeCells(1, map[int]int{0: 3, 2: 5}), 4)
	if got := r.Cells(2, 1, 5); !slices.Equal(got, numbers(2*testSize+1, 4)) {
		t.Errorf("%v", got)
	}
	if got := testRows(newFakeCells(1, map[int]int{0: 3}), 1).Cells(0, 0, 3); !slices.Equal(got, numbers(0, 3)) {
		t.Errorf("of one stream %v", got)
	}
	if got := r.Find(2, 5, 3, nil); !slices.Equal(got, numbers(2*testSize+5, 3)) {
		t.Errorf("found %v", got)
	}
}

func TestTierRowsThatAShiftCostAreLostUntilTheSlotIsEmpty(t *testing.T) {
	f := newFakeCells(2, map[int]int{0: 8, 1: 8})
	r := testRows(f, 2)
	if r.lost(0, 4) || f.asked > 0 {
		t.Error("looked for what nothing has moved")
	}
	r.shifted[0] = true
	if r.lost(0, 4) || r.lost(0, 0) {
		t.Error("lost, though all are there")
	}
	delete(f.held[1][0], 2) // the window's cell has another position's row
	f.held[1][0][9] = 8
	r.changed()
	if !r.lost(0, 4) || r.lost(0, 0) || r.lost(1, 4) {
		t.Error("not lost, or in another slot, too")
	}
	r.Drop(0, 0)
	if r.lost(0, 4) {
		t.Error("lost, though computed anew from the start")
	}
}

func TestTierWhatIsMissingDoubledOrDifferentIsNotThere(t *testing.T) {
	for name, spoil := range map[string]func(f *fakeCells){
		"missing":   func(f *fakeCells) { delete(f.held[0][0], 2); delete(f.held[1][0], 2) },
		"doubled":   func(f *fakeCells) { f.held[0][0][9] = 2; f.held[1][0][9] = 2 },
		"elsewhere": func(f *fakeCells) { delete(f.held[1][0], 2); f.held[1][0][7] = 2 },
		"more":      func(f *fakeCells) { f.held[1][0][9] = 9 },
		"beyond":    func(f *fakeCells) { f.held[0][0][9] = testSize; f.held[1][0][9] = testSize },
	} {
		f := newFakeCells(2, map[int]int{0: 5})
		r := testRows(f, 1)
		if r.Cells(0, 0, 5) == nil || r.Find(0, 5, 2, nil) == nil {
			t.Fatal("nothing of a sound cache")
		}
		spoil(f)
		r.changed()
		if got := r.Cells(0, 0, 5); got != nil {
			t.Errorf("%s: cells %v", name, got)
		}
		if got := r.Find(0, 5, 2, nil); got != nil {
			t.Errorf("%s: found %v", name, got)
		}
	}
}

func TestTierNothingIsPutWhereLlamaWouldNotPutIt(t *testing.T) {
	f := newFakeCells(2, map[int]int{0: 5})
	r := testRows(f, 1)
	if got := r.Find(0, 4, 2, nil); got != nil {
		t.Errorf("the slot holds more than what comes before: %v", got)
	}
	if got := r.Find(0, 6, 2, nil); got != nil {
		t.Errorf("the slot holds less than what comes before: %v", got)
	}
	if got := r.Find(0, 5, testSize, nil); got != nil {
		t.Errorf("more than there are cells: %v", got)
	}
	f.find = func(child, from, n int) []int32 { return numbers(from+child, n) }
	if got := r.Find(0, 5, 2, nil); got != nil {
		t.Errorf("the caches would take other cells: %v", got)
	}
	f.find = func(int, int, int) []int32 { return nil }
	if got := r.Find(0, 5, 2, nil); len(got) != 0 {
		t.Errorf("llama.cpp has none: %v", got)
	}
}

func TestTierCellsThatOneCacheDoesNotTakeAreNotThere(t *testing.T) {
	for _, refuses := range []int{-1, 0, 1} {
		f := newFakeCells(2, map[int]int{0: 5})
		f.refuses = refuses
		r := testRows(f, 1)
		r.Occupy(0, 5, r.Find(0, 5, 3, nil))
		if got := r.Cells(0, 0, 8) != nil; got != (refuses < 0) {
			t.Errorf("cache %d refuses, all there: %v", refuses, got)
		}
		r.Drop(0, 5)
		if got := r.Cells(0, 0, 5); !slices.Equal(got, numbers(0, 5)) {
			t.Errorf("cache %d refuses, after the drop: %v", refuses, got)
		}
	}
}

func TestTierCellsAreAskedForOnceUntilTheyChange(t *testing.T) {
	f := newFakeCells(1, map[int]int{0: 5})
	r := testRows(f, 1)
	for range 3 {
		r.Cells(0, 0, 5)
	}
	if f.asked != 1 {
		t.Errorf("asked %d times", f.asked)
	}
	f.held[0][0][5] = 5
	r.changed()
	if r.Cells(0, 0, 6) == nil {
		t.Error("what was asked before counts still")
	}
}

// memory is a tensor's, on the host or behind get and set.
type memory struct {
	data []byte
	host bool
}

func (m memory) KVTierHost() []byte {
	if m.host {
		return m.data
	}
	return nil
}

func (m memory) KVTierGet(offset int, dst []byte) { copy(dst, m.data[offset:]) }

func (m memory) KVTierSet(offset int, src []byte) { copy(m.data[offset:], src) }

func (m memory) KVTierGetColumns(runs []rows.Run, stride, columns int, dst []byte) {
	for _, run := range runs {
		for i := range columns {
			m.KVTierGet(run.Offset+i*stride, dst[:2*run.Cells])
			dst = dst[2*run.Cells:]
		}
	}
}

func (m memory) KVTierSetColumns(runs []rows.Run, stride, columns int, src []byte) {
	for _, run := range runs {
		for i := range columns {
			m.KVTierSet(run.Offset+i*stride, src[:2*run.Cells])
			src = src[2*run.Cells:]
		}
	}
}

func TestTierRowsLieInTheirSlotsStream(t *testing.T) {
	const rowBytes, streams = 4, 3
	for _, host := range []bool{true, false} {
		for _, permuted := range []bool{false, true} {
			m := memory{make([]byte, streams*testSize*rowBytes), host}
			r := testRows(newFakeCells(1, map[int]int{0: 2, 1: 2, 2: 2}), streams)
			for stream := range streams {
				r.planes = append(r.planes, []rows.Plane{{
					Tensor: streamTensor{m, stream * testSize * rowBytes, testSize * rowBytes}, RowBytes: rowBytes, Cells: testSize, Permuted: permuted,
				}})
			}
			cells := r.Find(1, 2, 3, nil)
			data := []byte("abcdefghijkl")
			r.Write(0, cells, rows.Chunk{Start: 0, Data: data[:4]})
			r.Write(0, cells, rows.Chunk{Start: 1, Data: data[4:]})
			back := make([]byte, len(data))
			r.Read(0, cells, back)
			if !bytes.Equal(back, data) {
				t.Errorf("host %v, permuted %v: %q", host, permuted, back)
			}
			own := m.data[testSize*rowBytes : 2*testSize*rowBytes]
			if n := len(m.data) - bytes.Count(m.data, []byte{0}); n != len(data) || len(own)-bytes.Count(own, []byte{0}) != n {
				t.Errorf("host %v, permuted %v: %d bytes in all, not all in the stream", host, permuted, n)
			}
			at := slices.Index(own, 'e')
			if want := map[bool]int{false: 3 * rowBytes, true: 3 * 2}[permuted]; at != want {
				t.Errorf("host %v, permuted %v: the second row begins at %d, want %d", host, permuted, at, want)
			}
			if got := r.Memory(0, cells); host && !permuted {
				if !bytes.Equal(slices.Concat(got...), data) {
					t.Errorf("its memory holds %q", got)
				}
			} else if got != nil {
				t.Errorf("host %v, permuted %v: has memory %q", host, permuted, got)
			}
		}
	}
}
