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

// tierTestOf is a cache of these children, one without a wrapper.
func tierTestOf(t *testing.T, children ...*Causal) *KVTierCache {
	t.Helper()
	cache, reason := KVTierCacheOf(tierTestOuter(children...))
	if reason != "" {
		t.Fatalf("not tiered: %s", reason)
	}
	return cache
}

func tierTestOuter(children ...*Causal) Cache {
	if len(children) == 1 {
		return children[0]
	}
	wrapper := NewWrapperCache()
	for _, child := range children {
		wrapper.caches = append(wrapper.caches, child)
	}
	return wrapper
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
				r := (&KVTierCache{children: []*Causal{c}}).Rows() // also one that is not tiered
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
						memory := r.Memory(segment, cells)
						if direct := host && !(v && permuted); direct != (memory != nil) || direct && !bytes.Equal(slices.Concat(memory...), all) {
							t.Fatalf("layer %d v=%v: their memory is %v", layer, v, memory)
						}
					}
				}
			})
		}
	}
}

func TestKVTierFreeCellsAreTheLowestAndNoneThatIsPending(t *testing.T) {
	c := tierTestCache(false, true)
	r := tierTestOf(t, c).Rows()
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
	r := tierTestOf(t, c).Rows()
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
	r := tierTestOf(t, c).Rows()
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

func TestKVTierLayersAreSorted(t *testing.T) {
	for _, permuted := range []bool{false, true} {
		window, full, chunks := tierTestCache(permuted, true), tierTestCache(permuted, true), tierTestCache(permuted, true)
		window.swaWindowSize, chunks.chunkSize = 128, 8192
		delete(full.keys, 0)
		delete(full.values, 0)
		clear(chunks.keys) // its layers are those of no child: they share others' rows
		clear(chunks.values)
		layer := KVTierLayer{
			Layer: 0, Kind: "swa", Window: 128, KVHeads: tierTestHeads, KHeadDim: tierTestKDim, VHeadDim: tierTestVDim,
			KRowBytes: 24, VRowBytes: 30,
		}
		want := []KVTierLayer{layer, layer, layer}
		want[1].Layer, want[2].Layer = 2, 2
		want[2].Child, want[2].Kind, want[2].Window = 1, "full", 0
		cache := tierTestOf(t, window, full, chunks)
		if got := cache.Layers(); !slices.Equal(got, want) {
			t.Errorf("permuted=%v: layers %v", permuted, got)
		}
		if got := cache.ComputedBy(); got != "hhh" || !cache.OnHost() {
			t.Errorf("computed by %s, on the host: %v", got, cache.OnHost())
		}
		chunks = tierTestCache(permuted, true)
		chunks.chunkSize = 8192
		if got := tierTestOf(t, chunks).Layers()[0]; got.Kind != "chunked" || got.Window != 8192 {
			t.Errorf("layer %v", got)
		}
	}
}

func TestKVTierWhoComputesRowsIsNotWhereTheyLie(t *testing.T) {
	for name, test := range map[string]struct {
		keys, values tierTensorFake
		by           string
		onHost       bool
	}{
		"the host":                        {tierTensorFake{host: true}, tierTensorFake{host: true}, "hh", true},
		"a device":                        {tierTensorFake{}, tierTensorFake{}, "hd", false},
		"a device, in memory of the host": {tierTensorFake{host: true, pinned: true}, tierTensorFake{host: true, pinned: true}, "hd", false},
		"a device, V alone":               {tierTensorFake{host: true}, tierTensorFake{host: true, pinned: true}, "hh", false},
	} {
		c := tierTestCache(false, true)
		for tensor, as := range map[ml.Tensor]tierTensorFake{c.keys[2]: test.keys, c.values[2]: test.values} {
			tensor.(*tierTensorFake).host, tensor.(*tierTensorFake).pinned = as.host, as.pinned
		}
		cache := tierTestOf(t, c)
		if got := cache.ComputedBy(); got != test.by || cache.OnHost() != test.onHost {
			t.Errorf("%s: computed by %s, on the host: %v", name, got, cache.OnHost())
		}
	}
}

func TestKVTierUnsupportedCachesSayWhy(t *testing.T) {
	for reason, change := range map[string]func(c *Causal){
		"K/V cache of another type than f16, q8_0 and q4_0": func(c *Causal) { c.DType = ml.DTypeF32 },
		"V is transposed and quantised": func(c *Causal) {
			*c = *tierTestCache(true, true)
			c.DType = ml.DTypeQ80
		},
		"layers with one of K and V": func(c *Causal) { delete(c.values, 2) },
		"layer 2 has no plain K and V": func(c *Causal) {
			c.values[7] = c.values[2]
			delete(c.values, 2)
		},
		"V is transposed on a device that can't copy it exactly (OLLAMA_FLASH_ATTENTION=1 avoids that)": func(c *Causal) {
			*c = *tierTestCache(true, false)
			c.values[2].(*tierTensorFake).inexact = true
		},
	} {
		c := tierTestCache(false, true)
		change(c)
		if _, got := KVTierCacheOf(c); got != reason {
			t.Errorf("reason %q, want %q", got, reason)
		}
		other := tierTestCache(c.config.PermutedV, true)
		if _, got := KVTierCacheOf(tierTestOuter(other, c)); got != reason {
			t.Errorf("as the second child: reason %q, want %q", got, reason)
		}
	}
	empty := tierTestCache(false, true)
	clear(empty.keys)
	clear(empty.values)
	smaller := tierTestCache(false, true)
	smaller.cells = smaller.cells[:tierTestCells-1]
	window := tierTestCache(false, true)
	window.swaWindowSize, window.swaMemorySize = 128, 512
	for reason, cache := range map[string]Cache{
		"no layer that keeps every row": tierTestOuter(empty, window),
		"caches of several sizes":       tierTestOuter(tierTestCache(false, true), smaller),
		"attention to images that no mask limits: a row depends on how its batch was cut": NewWrapperCache(
			NewEncoderCache(), tierTestCache(false, true)),
		"cache of type *kvcache.EncoderCache, not supported yet": NewEncoderCache(),
		"cache of type *kvcache.WrapperCache, not supported yet": NewWrapperCache(NewWrapperCache()),
	} {
		if _, got := KVTierCacheOf(cache); got != reason {
			t.Errorf("reason %q, want %q", got, reason)
		}
	}
}

func TestKVTierRowsGoToTheLayersOfTheirChild(t *testing.T) {
	children := []*Causal{tierTestCache(false, true), tierTestCache(false, true)}
	r := tierTestOf(t, children...).Rows()
	cells := []int32{3, 9}
	for segment := range 8 {
		bytesOfRow := 2 * tierTestHeads * []int{tierTestKDim, tierTestVDim}[segment%2]
		r.Write(segment, cells, rows.Chunk{Data: bytes.Repeat([]byte{byte(segment + 1)}, 2*bytesOfRow)})
	}
	segment := 0
	for _, child := range children {
		for _, layer := range []int{0, 2} {
			for _, v := range []bool{false, true} {
				segment++
				if got := child.tierTestElement(layer, v, 9, 2, 3); !bytes.Equal(got, []byte{byte(segment), byte(segment)}) {
					t.Errorf("layer %d v=%v: %v, want segment %d", layer, v, got, segment)
				}
			}
		}
	}
}

func TestKVTierChildrenHoldTheSamePositionsInTheSameCells(t *testing.T) {
	a, b := tierTestCache(false, true), tierTestCache(false, true)
	r := tierTestOf(t, a, b).Rows()
	b.cells[1] = cacheCell{pos: 0, sequences: []int{7}}
	if got, want := r.Find(0, 0, 3, nil), []int32{0, 2, 3}; !slices.Equal(got, want) {
		t.Errorf("free in both %v, want %v", got, want)
	}
	b.cells[1] = cacheCell{}
	r.Occupy(0, 0, []int32{4, 5, 6})
	for _, child := range []*Causal{a, b} {
		if got := child.tierCells(0, 0, 3); !slices.Equal(got, []int32{4, 5, 6}) {
			t.Errorf("cells of a child %v", got)
		}
	}
	if got := r.Cells(0, 0, 3); !slices.Equal(got, []int32{4, 5, 6}) {
		t.Errorf("cells %v", got)
	}
	b.cells[4].pos, b.cells[5].pos = 1, 0
	if got := r.Cells(0, 0, 3); got != nil {
		t.Errorf("the children differ, yet cells %v", got)
	}
	if got := r.Cells(0, 2, 3); !slices.Equal(got, []int32{6}) {
		t.Errorf("cells %v", got)
	}
	r.Drop(0, 2)
	for _, child := range []*Causal{a, b} {
		if got := child.tierCells(0, 2, 3); got != nil {
			t.Errorf("dropped, yet a child has cells %v", got)
		}
	}
}

func TestKVTierBatchCellsAreThoseOfAllChildren(t *testing.T) {
	a, b := tierTestCache(false, true), tierTestCache(false, true)
	a.tierLocs, b.tierLocs = []int32{1, 2}, []int32{1, 2}
	cache := tierTestOf(t, a, b)
	if got := cache.BatchCells(); !slices.Equal(got, []int32{1, 2}) {
		t.Errorf("cells %v", got)
	}
	b.tierLocs = []int32{1, 7}
	if got := cache.BatchCells(); !slices.Equal(got, []int32{1, 2, 7}) {
		t.Errorf("cells %v", got)
	}
}
