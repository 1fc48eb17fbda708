package rows

import (
	"bytes"
	"fmt"
	"math/rand"
	"testing"
)

// memory is a tensor's; host says whether the CPU may see it.
type memory struct {
	data []byte
	host bool
	sets int
}

func (m *memory) KVTierHost() []byte {
	if m.host {
		return m.data
	}
	return nil
}

func (m *memory) KVTierGet(offset int, dst []byte) { copy(dst, m.data[offset:offset+len(dst)]) }

func (m *memory) KVTierSet(offset int, src []byte) {
	m.sets++
	copy(m.data[offset:offset+len(src)], src)
}

func (m *memory) KVTierGetColumns(runs []Run, stride, columns int, dst []byte) {
	for _, run := range runs {
		for i := range columns {
			m.KVTierGet(run.Offset+i*stride, dst[:2*run.Cells])
			dst = dst[2*run.Cells:]
		}
	}
}

func (m *memory) KVTierSetColumns(runs []Run, stride, columns int, src []byte) {
	m.sets++
	for _, run := range runs {
		for i := range columns {
			copy(m.data[run.Offset+i*stride:], src[:2*run.Cells])
			src = src[2*run.Cells:]
		}
	}
}

// counted notes how much of a row was written when it was told so.
type counted struct {
	*memory
	told [][]byte
}

func (c *counted) KVTierWritten() { c.told = append(c.told, bytes.Clone(c.data)) }

func TestABackendIsToldOfWhatTheHostWrites(t *testing.T) {
	for _, host := range []bool{false, true} {
		p, m := testPlane(false, host)
		c := &counted{memory: m}
		p.Tensor = c
		row := bytes.Repeat([]byte{7}, p.RowBytes)
		p.Read([]int32{3}, make([]byte, p.RowBytes))
		if len(c.told) != 0 {
			t.Errorf("host=%v: reading is no writing", host)
		}
		p.Write([]int32{3}, Chunk{Data: row})
		if len(c.told) != 1 || !bytes.Equal(c.told[0][3*p.RowBytes:4*p.RowBytes], row) {
			t.Errorf("host=%v: told %d times, and not when it was written", host, len(c.told))
		}
		if pieces := p.Memory([]int32{3, 4}); host && (len(pieces) != 1 || len(c.told) != 2) {
			t.Errorf("told %d times of memory that is written", len(c.told))
		}
	}
}

const testCells, testElements = 40, 15 // cells of a tensor, elements of a row

func testPlane(permuted, host bool) (Plane, *memory) {
	m := &memory{data: make([]byte, 2*testCells*testElements), host: host}
	return Plane{Tensor: m, RowBytes: 2 * testElements, Cells: testCells, Permuted: permuted}, m
}

// element returns the two bytes of element i of a cell's row, read straight from the tensor's memory.
func element(p Plane, m *memory, cell, i int) []byte {
	n := cell*testElements + i
	if p.Permuted {
		n = cell + testCells*i
	}
	return m.data[2*n : 2*n+2]
}

func TestRowsAreInOrderWhateverCellsAndLayout(t *testing.T) {
	for _, permuted := range []bool{false, true} {
		for _, host := range []bool{false, true} {
			t.Run(fmt.Sprintf("permuted=%v,host=%v", permuted, host), func(t *testing.T) {
				p, m := testPlane(permuted, host)
				cells := []int32{3, 4, 5, 9, 7, 8, 30, 39}
				rows := make([]byte, len(cells)*p.RowBytes)
				rand.New(rand.NewSource(1)).Read(rows)
				// two chunks, as from two blocks; the second starts inside a run of cells
				p.Write(cells, Chunk{Start: 0, Data: rows[:2*p.RowBytes]})
				p.Write(cells, Chunk{Start: 2, Data: rows[2*p.RowBytes:]})
				for i, cell := range cells {
					for e := range testElements {
						at := i*p.RowBytes + 2*e
						if got := element(p, m, int(cell), e); !bytes.Equal(got, rows[at:at+2]) {
							t.Fatalf("cell %d element %d: %x, want %x", cell, e, got, rows[at:at+2])
						}
					}
				}
				back := make([]byte, len(rows))
				p.Read(cells, back)
				if !bytes.Equal(back, rows) {
					t.Fatal("rows read differ from rows written")
				}
			})
		}
	}
}

func TestWriteTouchesOnlyTheCellsOfItsChunks(t *testing.T) {
	for _, permuted := range []bool{false, true} {
		p, m := testPlane(permuted, true)
		for i := range m.data {
			m.data[i] = 0xAA
		}
		p.Write([]int32{10, 11, 12}, Chunk{Start: 1, Data: make([]byte, p.RowBytes)})
		changed := 0
		for i := range m.data {
			if m.data[i] != 0xAA {
				changed++
			}
		}
		if changed != p.RowBytes {
			t.Errorf("permuted=%v: %d bytes changed, want %d", permuted, changed, p.RowBytes)
		}
		if got := element(p, m, 11, 0); !bytes.Equal(got, []byte{0, 0}) {
			t.Errorf("permuted=%v: cell 11 not written", permuted)
		}
	}
}

func TestADeviceIsWrittenOncePerRunOfCells(t *testing.T) {
	for _, permuted := range []bool{false, true} {
		p, m := testPlane(permuted, false)
		p.Write([]int32{0, 1, 2, 3, 20, 21}, Chunk{Data: make([]byte, 6*p.RowBytes)})
		if want := map[bool]int{false: 2, true: 1}[permuted]; m.sets != want {
			t.Errorf("permuted=%v: %d writes for 2 runs of cells", permuted, m.sets)
		}
	}
}

func TestMemoryIsThatOfTheCellsInTheirOrder(t *testing.T) {
	p, m := testPlane(false, true)
	cells := []int32{3, 4, 5, 9, 7, 8, 39}
	for i, cell := range cells {
		copy(m.data[int(cell)*p.RowBytes:], bytes.Repeat([]byte{byte(i + 1)}, p.RowBytes))
	}
	var got []byte
	pieces := p.Memory(cells)
	for _, piece := range pieces {
		if cap(piece) != len(piece) {
			t.Error("a piece may grow into the next cell")
		}
		got = append(got, piece...)
	}
	want := make([]byte, len(got))
	p.Read(cells, want)
	if len(pieces) != 4 || len(got) != len(cells)*p.RowBytes || !bytes.Equal(got, want) {
		t.Errorf("%d pieces, %v", len(pieces), got)
	}
	pieces[1][0] = 99
	if m.data[9*p.RowBytes] != 99 {
		t.Error("it is a copy")
	}
	for _, c := range []struct{ permuted, host bool }{{true, true}, {false, false}, {true, false}} {
		if p, _ := testPlane(c.permuted, c.host); p.Memory(cells) != nil {
			t.Errorf("%+v: rows that are not in one piece, or not the CPU's", c)
		}
	}
}
