package kvcache

import (
	"bytes"
	"fmt"
	"math"
	"math/rand"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/ml"
)

// tierTensorFake is a tensor of 2-byte elements; host says whether the CPU may see its memory.
type tierTensorFake struct {
	ml.Tensor
	dims []int
	data []byte
	host bool
}

func newTierTensorFake(host bool, dims ...int) *tierTensorFake {
	n := 2
	for _, d := range dims {
		n *= d
	}
	return &tierTensorFake{dims: dims, data: make([]byte, n), host: host}
}

func (t *tierTensorFake) Dim(n int) int { return t.dims[n] }

func (t *tierTensorFake) Stride(n int) int {
	s := 2
	for i := range n {
		s *= t.dims[i]
	}
	return s
}

func (t *tierTensorFake) DType() ml.DType { return ml.DTypeF16 }

func (t *tierTensorFake) KVTierHost() []byte {
	if t.host {
		return t.data
	}
	return nil
}

func (t *tierTensorFake) KVTierGet(offset int, dst []byte) { copy(dst, t.data[offset:offset+len(dst)]) }

func (t *tierTensorFake) KVTierSet(offset int, src []byte) { copy(t.data[offset:offset+len(src)], src) }

const (
	tierTestCells, tierTestHeads, tierTestKDim, tierTestVDim = 40, 3, 4, 5
)

func tierTestCache(permuted, host bool) *Causal {
	c := NewCausalCache(nil)
	c.config = &ml.CacheConfig{PermutedV: permuted, CachePadding: 1}
	c.DType = ml.DTypeF16
	c.swaWindowSize, c.swaMemorySize = math.MaxInt32, math.MaxInt32
	c.cells = make([]cacheCell, tierTestCells)
	c.cellRanges = make(map[int]cellRange)
	for _, layer := range []int{2, 0} {
		c.keys[layer] = newTierTensorFake(host, tierTestKDim, tierTestHeads, tierTestCells)
		if permuted {
			c.values[layer] = newTierTensorFake(host, tierTestCells, tierTestVDim, tierTestHeads)
		} else {
			c.values[layer] = newTierTensorFake(host, tierTestVDim, tierTestHeads, tierTestCells)
		}
	}
	return c
}

// element returns the two bytes of (head, dim) of a cell, read straight from the tensor's layout.
func (c *Causal) tierTestElement(layer int, v bool, cell, head, dim int) []byte {
	t, n := c.keys[layer].(*tierTensorFake), 0
	switch {
	case !v:
		n = cell*tierTestHeads*tierTestKDim + head*tierTestKDim + dim
	case c.config.PermutedV:
		t = c.values[layer].(*tierTensorFake)
		n = cell + tierTestCells*(dim+tierTestVDim*head)
	default:
		t = c.values[layer].(*tierTensorFake)
		n = cell*tierTestHeads*tierTestVDim + head*tierTestVDim + dim
	}
	return t.data[2*n : 2*n+2]
}

func TestKVTierRowsAreCanonicalWhateverTheTensorsLayout(t *testing.T) {
	for _, permuted := range []bool{false, true} {
		for _, host := range []bool{false, true} {
			t.Run(fmt.Sprintf("permuted=%v,host=%v", permuted, host), func(t *testing.T) {
				c := tierTestCache(permuted, host)
				r := c.KVTierRows()
				cells := []int32{3, 4, 5, 9, 7, 8, 30}
				for i, layer := range []int{0, 2} {
					for _, v := range []bool{false, true} {
						dim := tierTestKDim
						if v {
							dim = tierTestVDim
						}
						rowBytes := 2 * tierTestHeads * dim
						all := make([]byte, len(cells)*rowBytes)
						rand.New(rand.NewSource(int64(layer))).Read(all)
						// two chunks, as from two blocks; the second starts inside a run of cells
						segment := 2 * i
						if v {
							segment++
						}
						r.Write(segment, cells, rows.Chunk{Start: 0, Data: all[:2*rowBytes]})
						r.Write(segment, cells, rows.Chunk{Start: 2, Data: all[2*rowBytes:]})
						for i, cell := range cells {
							for head := range tierTestHeads {
								for d := range dim {
									at := i*rowBytes + 2*(head*dim+d)
									if got := c.tierTestElement(layer, v, int(cell), head, d); !bytes.Equal(got, all[at:at+2]) {
										t.Fatalf("layer %d v=%v cell %d head %d dim %d: %x, want %x", layer, v, cell, head, d, got, all[at:at+2])
									}
								}
							}
						}
						back := make([]byte, len(all))
						r.Read(segment, cells, back)
						if !bytes.Equal(back, all) {
							t.Fatalf("layer %d v=%v: rows read differ from rows written", layer, v)
						}
					}
				}
			})
		}
	}
}

func TestKVTierFreeCellsAreTheLowestAndNoneThatIsPending(t *testing.T) {
	c := tierTestCache(false, true)
	r := c.KVTierRows()
	c.cells[0] = cacheCell{pos: 0, sequences: []int{1}}
	c.cells[2] = cacheCell{pos: 1, sequences: []int{1}}
	got := r.Find(1, 0, 4, map[int32]struct{}{3: {}, 5: {}})
	if want := []int32{1, 4, 6, 7}; !slices.Equal(got, want) {
		t.Errorf("free cells %v, want %v", got, want)
	}
	if got := r.Find(1, 0, 1000, nil); len(got) != tierTestCells-2 {
		t.Errorf("%d free cells, want %d", len(got), tierTestCells-2)
	}
}

func TestKVTierOccupiedCellsAreFoundByPosition(t *testing.T) {
	c := tierTestCache(false, true)
	r := c.KVTierRows()
	r.Occupy(1, 0, []int32{5, 6, 3})
	r.Occupy(1, 3, []int32{12})
	if got := r.Cells(1, 0, 4); !slices.Equal(got, []int32{5, 6, 3, 12}) {
		t.Errorf("cells %v", got)
	}
	if got := r.Cells(1, 2, 4); !slices.Equal(got, []int32{3, 12}) {
		t.Errorf("cells %v", got)
	}
	if got := c.cellRanges[1]; got != (cellRange{min: 3, max: 12}) {
		t.Errorf("range %v", got)
	}
	r.Drop(1, 2)
	if got := r.Cells(1, 2, 4); got != nil {
		t.Errorf("dropped, yet cells %v", got)
	}
	if got := r.Cells(1, 0, 2); !slices.Equal(got, []int32{5, 6}) {
		t.Errorf("cells after Remove %v", got)
	}
}

func TestKVTierGapOrDoublePositionIsNoSequence(t *testing.T) {
	c := tierTestCache(false, true)
	r := c.KVTierRows()
	r.Occupy(0, 0, []int32{0, 1})
	r.Occupy(0, 3, []int32{2})
	if got := r.Cells(0, 0, 4); got != nil {
		t.Errorf("position 2 is missing, yet cells %v", got)
	}
	r.Occupy(0, 1, []int32{7})
	if got := r.Cells(0, 0, 2); got != nil {
		t.Errorf("position 1 is held twice, yet cells %v", got)
	}
	if got := r.Cells(0, 0, 3); got != nil {
		t.Errorf("position 1 is held twice and 2 is missing, yet cells %v", got)
	}
	if got := r.Cells(9, 0, 1); got != nil {
		t.Errorf("unknown sequence, yet cells %v", got)
	}
}

func TestKVTierLayersAreSortedAndUnsupportedCachesSayWhy(t *testing.T) {
	for _, permuted := range []bool{false, true} {
		c := tierTestCache(permuted, true)
		want := []KVTierLayer{
			{Layer: 0, KVHeads: tierTestHeads, KHeadDim: tierTestKDim, VHeadDim: tierTestVDim, KRowBytes: 24, VRowBytes: 30},
			{Layer: 2, KVHeads: tierTestHeads, KHeadDim: tierTestKDim, VHeadDim: tierTestVDim, KRowBytes: 24, VRowBytes: 30},
		}
		if got := c.KVTierLayers(); !slices.Equal(got, want) {
			t.Errorf("permuted=%v: layers %v", permuted, got)
		}
		if reason := c.KVTierUnsupported(); reason != "" {
			t.Errorf("permuted=%v: unsupported: %s", permuted, reason)
		}
	}
	for reason, change := range map[string]func(c *Causal){
		"sliding window attention":                          func(c *Causal) { c.swaWindowSize = 128 },
		"chunked attention":                                 func(c *Causal) { c.chunkSize = 128 },
		"K/V cache of another type than f16, q8_0 and q4_0": func(c *Causal) { c.DType = ml.DTypeF32 },
		"V is transposed and quantised": func(c *Causal) {
			*c = *tierTestCache(true, true)
			c.DType = ml.DTypeQ80
		},
		"no K/V layers": func(c *Causal) { clear(c.keys) },
		"V is transposed on the device (OLLAMA_FLASH_ATTENTION=1 avoids that)": func(c *Causal) {
			*c = *tierTestCache(true, false)
		},
	} {
		c := tierTestCache(false, true)
		change(c)
		if got := c.KVTierUnsupported(); got != reason {
			t.Errorf("reason %q, want %q", got, reason)
		}
	}
}
