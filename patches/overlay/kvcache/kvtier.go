package kvcache

import (
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/ollama/ollama/ml"
)

// Rows of a causal cache as the KV tiering sees them: which cells hold a sequence's positions, and the bytes of cells in
// canonical layout (rows in position order, each [kv heads][head dim]) whatever the layout of the tensor.
//
// Locking: as for the other methods of Causal, the caller serialises everything here with StartForward and Remove.
// Reading rows needs their computation to have finished; writing needs that no unfinished batch writes the cells.

// KVTierTensor is what a backend's tensor must offer so that parts of it can be read and written.
type KVTierTensor interface {
	// KVTierHost returns the tensor's memory if the CPU can access it, else nil.
	KVTierHost() []byte
	KVTierGet(offset int, dst []byte)
	KVTierSet(offset int, src []byte)
}

// KVTierLayer is the geometry of one layer's rows.
type KVTierLayer struct {
	Layer                       int
	KVHeads, KHeadDim, VHeadDim int
	ElemBytes                   int
}

// KVTierChunk is a run of rows: Data holds the rows of cells[Start], cells[Start+1], …
type KVTierChunk struct {
	Start int
	Data  []byte
}

// KVTierUnsupported returns why the rows of this cache can't be tiered, or "".
func (c *Causal) KVTierUnsupported() string {
	switch {
	case c.swaWindowSize != math.MaxInt32 || c.swaMemorySize != math.MaxInt32:
		return "sliding window attention"
	case c.chunkSize != 0:
		return "chunked attention"
	case c.DType != ml.DTypeF16:
		return "quantised K/V cache"
	case len(c.keys) == 0 || len(c.keys) != len(c.values):
		return "no K/V layers"
	}
	for layer, key := range c.keys {
		value, ok := c.values[layer]
		if !ok || key.DType() != c.DType || value.DType() != c.DType {
			return fmt.Sprintf("layer %d has no plain K and V", layer)
		}
		for _, t := range []ml.Tensor{key, value} {
			if _, ok := t.(KVTierTensor); !ok {
				return "backend without partial tensor access"
			}
		}
	}
	return ""
}

// KVTierLayers returns the geometry of every layer that has K/V, by layer number.
func (c *Causal) KVTierLayers() []KVTierLayer {
	layers := make([]KVTierLayer, 0, len(c.keys))
	for layer, key := range c.keys {
		value := c.values[layer]
		vHeadDim := value.Dim(0)
		if c.config.PermutedV {
			vHeadDim = value.Dim(1)
		}
		layers = append(layers, KVTierLayer{
			Layer: layer, KVHeads: key.Dim(1), KHeadDim: key.Dim(0), VHeadDim: vHeadDim, ElemBytes: key.Stride(0),
		})
	}
	slices.SortFunc(layers, func(a, b KVTierLayer) int { return a.Layer - b.Layer })
	return layers
}

// KVTierOnHost reports whether the CPU can access all rows directly.
func (c *Causal) KVTierOnHost() bool {
	for layer := range c.keys {
		if c.keys[layer].(KVTierTensor).KVTierHost() == nil || c.values[layer].(KVTierTensor).KVTierHost() == nil {
			return false
		}
	}
	return true
}

// KVTierBatchCells returns a copy of the cells that the last StartForward assigned to its batch.
func (c *Causal) KVTierBatchCells() []int32 {
	return slices.Clone(c.tierLocs)
}

// KVTierCells returns the cell of every position of seq in [from, to), or nil if one is missing or held twice.
func (c *Causal) KVTierCells(seq int, from, to int32) []int32 {
	cells := make([]int32, to-from)
	found := 0
	seqRange, ok := c.cellRanges[seq]
	if !ok {
		return nil
	}
	seen := make([]bool, len(cells))
	for i := seqRange.min; i <= seqRange.max; i++ {
		pos := c.cells[i].pos
		if pos < from || pos >= to || !slices.Contains(c.cells[i].sequences, seq) {
			continue
		}
		if seen[pos-from] {
			return nil
		}
		seen[pos-from] = true
		cells[pos-from] = int32(i)
		found++
	}
	if found != len(cells) {
		return nil
	}
	return cells
}

// KVTierFreeCells returns the lowest free cells, at most n, none of which is in except.
func (c *Causal) KVTierFreeCells(n int, except map[int32]struct{}) []int32 {
	cells := make([]int32, 0, n)
	for i := range c.cells {
		if len(cells) == n {
			break
		}
		if len(c.cells[i].sequences) != 0 {
			continue
		}
		if _, ok := except[int32(i)]; !ok {
			cells = append(cells, int32(i))
		}
	}
	return cells
}

// KVTierOccupy gives cells to seq: cells[i] holds position from+i. The rows must have been written.
func (c *Causal) KVTierOccupy(seq int, from int32, cells []int32) {
	r, ok := c.cellRanges[seq]
	if !ok {
		r = newRange()
	}
	for i, cell := range cells {
		c.cells[cell] = cacheCell{pos: from + int32(i), sequences: []int{seq}}
		r.min = min(r.min, int(cell))
		r.max = max(r.max, int(cell))
	}
	c.cellRanges[seq] = r
}

// KVTierRead copies the rows of cells into dst, one after the other.
func (c *Causal) KVTierRead(layer int, v bool, cells []int32, dst []byte) {
	t, rowBytes, permuted := c.tierTensor(layer, v)
	host := t.KVTierHost()
	for start := 0; start < len(cells); {
		n := tierRun(cells[start:])
		first, out := int(cells[start]), dst[start*rowBytes:(start+n)*rowBytes]
		switch {
		case permuted:
			columns := rowBytes / 2
			stage := make([]byte, 0)
			for col := range columns {
				at := 2 * (first + len(c.cells)*col)
				var src []byte
				if host != nil {
					src = host[at : at+2*n]
				} else {
					stage = slices.Grow(stage[:0], 2*n)[:2*n]
					t.KVTierGet(at, stage)
					src = stage
				}
				tierScatter(out, src, col, columns)
			}
		case host != nil:
			copy(out, host[first*rowBytes:])
		default:
			t.KVTierGet(first*rowBytes, out)
		}
		start += n
	}
}

// KVTierWrite writes the rows of chunks into cells. Rows of cells that no chunk covers are left alone. A tensor the CPU
// can't access is written once per run of cells, gathered over the chunks, not once per chunk.
func (c *Causal) KVTierWrite(layer int, v bool, cells []int32, chunks []KVTierChunk) {
	t, rowBytes, permuted := c.tierTensor(layer, v)
	host := t.KVTierHost()
	if host == nil {
		chunks = tierGather(chunks, rowBytes)
	}
	for _, chunk := range chunks {
		part := cells[chunk.Start : chunk.Start+len(chunk.Data)/rowBytes]
		for start := 0; start < len(part); {
			n := tierRun(part[start:])
			first, src := int(part[start]), chunk.Data[start*rowBytes:(start+n)*rowBytes]
			switch {
			case permuted:
				columns := rowBytes / 2
				stage := make([]byte, 2*n)
				for col := range columns {
					at := 2 * (first + len(c.cells)*col)
					if host != nil {
						tierColumn(host[at:at+2*n], src, col, columns)
					} else {
						tierColumn(stage, src, col, columns)
						t.KVTierSet(at, stage)
					}
				}
			case host != nil:
				copy(host[first*rowBytes:], src)
			default:
				t.KVTierSet(first*rowBytes, src)
			}
			start += n
		}
	}
}

// tierTensor returns a layer's K or V tensor, the bytes of a row of it, and whether it is stored [cells, head dim, heads].
func (c *Causal) tierTensor(layer int, v bool) (KVTierTensor, int, bool) {
	key := c.keys[layer]
	if !v {
		return key.(KVTierTensor), key.Stride(2), false
	}
	value := c.values[layer]
	if !c.config.PermutedV {
		return value.(KVTierTensor), value.Stride(2), false
	}
	return value.(KVTierTensor), value.Dim(1) * value.Dim(2) * value.Stride(0), true
}

// tierRun returns how many cells from the first on follow each other.
func tierRun(cells []int32) int {
	n := 1
	for n < len(cells) && cells[n] == cells[0]+int32(n) {
		n++
	}
	return n
}

// tierGather joins chunks that follow each other.
func tierGather(chunks []KVTierChunk, rowBytes int) []KVTierChunk {
	var out []KVTierChunk
	for i := 0; i < len(chunks); {
		j, rows, size := i, 0, 0
		for j < len(chunks) && chunks[j].Start == chunks[i].Start+rows {
			size += len(chunks[j].Data)
			rows = size / rowBytes
			j++
		}
		data := make([]byte, 0, size)
		for _, chunk := range chunks[i:j] {
			data = append(data, chunk.Data...)
		}
		out = append(out, KVTierChunk{Start: chunks[i].Start, Data: data})
		i = j
	}
	return out
}

// tierScatter writes 2-byte elements of one column into rows; tierColumn reads them out of rows.
func tierScatter(rows, column []byte, col, columns int) {
	dst, src := tierElems(rows), tierElems(column)
	for r, e := range src {
		dst[r*columns+col] = e
	}
}

func tierColumn(column, rows []byte, col, columns int) {
	dst, src := tierElems(column), tierElems(rows)
	for r := range dst {
		dst[r] = src[r*columns+col]
	}
}

func tierElems(b []byte) []uint16 {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*uint16)(unsafe.Pointer(&b[0])), len(b)/2)
}
