package kvcache

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
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
	if c.config.PermutedV && !c.KVTierOnHost() {
		// One element of V at a time would cross the bus, with the runner's lock held.
		return "V is transposed on the device (OLLAMA_FLASH_ATTENTION=1 avoids that)"
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

// KVTierPlacement says of every layer whether its rows lie in host memory (h) or on a device (d).
func (c *Causal) KVTierPlacement() string {
	var s strings.Builder
	for _, l := range c.KVTierLayers() {
		if c.keys[l.Layer].(KVTierTensor).KVTierHost() != nil {
			s.WriteByte('h')
		} else {
			s.WriteByte('d')
		}
	}
	return s.String()
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
		case permuted && host != nil:
			tierTranspose(out, rowBytes, host[2*first:], 2*len(c.cells), rowBytes/2, n)
		case permuted:
			columns := make([]byte, len(out))
			for col := range rowBytes / 2 {
				t.KVTierGet(2*(first+len(c.cells)*col), columns[2*n*col:2*n*(col+1)])
			}
			tierTranspose(out, rowBytes, columns, 2*n, rowBytes/2, n)
		case host != nil:
			copy(out, host[first*rowBytes:])
		default:
			t.KVTierGet(first*rowBytes, out)
		}
		start += n
	}
}

// KVTierWrite writes the rows of a chunk into cells. Rows of cells that it does not cover are left alone. A tensor the CPU
// can't access is written once per run of cells.
func (c *Causal) KVTierWrite(layer int, v bool, cells []int32, chunk KVTierChunk) {
	t, rowBytes, permuted := c.tierTensor(layer, v)
	host := t.KVTierHost()
	part := cells[chunk.Start : chunk.Start+len(chunk.Data)/rowBytes]
	for start := 0; start < len(part); {
		n := tierRun(part[start:])
		first, src := int(part[start]), chunk.Data[start*rowBytes:(start+n)*rowBytes]
		switch {
		case permuted && host != nil:
			tierTranspose(host[2*first:], 2*len(c.cells), src, rowBytes, n, rowBytes/2)
		case permuted:
			columns := make([]byte, len(src))
			tierTranspose(columns, 2*n, src, rowBytes, n, rowBytes/2)
			for col := range rowBytes / 2 {
				t.KVTierSet(2*(first+len(c.cells)*col), columns[2*n*col:2*n*(col+1)])
			}
		case host != nil:
			copy(host[first*rowBytes:], src)
		default:
			t.KVTierSet(first*rowBytes, src)
		}
		start += n
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

// tierTranspose writes element j of line i of src to element i of line j of dst, for i < lines and j < length. Elements
// have 2 bytes; a line of src starts every srcStride bytes, one of dst every dstStride bytes.
//
// Four by four elements at a time, as four 64-bit words: several times faster than one by one, and without assembly.
func tierTranspose(dst []byte, dstStride int, src []byte, srcStride int, lines, length int) {
	if lines == 0 || length == 0 {
		return
	}
	_, _ = src[srcStride*(lines-1)+2*length-1], dst[dstStride*(length-1)+2*lines-1]
	const even, low = 0x0000ffff0000ffff, 0x00000000ffffffff
	s, d := unsafe.Pointer(&src[0]), unsafe.Pointer(&dst[0])
	word := func(p unsafe.Pointer, at int) *uint64 { return (*uint64)(unsafe.Add(p, at)) }
	j := 0
	for ; nativeLittleEndian && j+4 <= length; j += 4 {
		i := 0
		for ; i+4 <= lines; i += 4 {
			from := i*srcStride + 2*j
			a, b := *word(s, from), *word(s, from+srcStride)
			c, e := *word(s, from+2*srcStride), *word(s, from+3*srcStride)
			ab0, ab1 := a&even|b&even<<16, a>>16&even|b&^even
			ce0, ce1 := c&even|e&even<<16, c>>16&even|e&^even
			to := j*dstStride + 2*i
			*word(d, to) = ab0&low | ce0<<32
			*word(d, to+dstStride) = ab1&low | ce1<<32
			*word(d, to+2*dstStride) = ab0>>32 | ce0&^low
			*word(d, to+3*dstStride) = ab1>>32 | ce1&^low
		}
		tierTransposePlain(dst, dstStride, src, srcStride, i, lines, j, j+4)
	}
	tierTransposePlain(dst, dstStride, src, srcStride, 0, lines, j, length)
}

// tierTransposePlain is tierTranspose, one element at a time, for lines [i0, i1) and elements [j0, j1).
func tierTransposePlain(dst []byte, dstStride int, src []byte, srcStride, i0, i1, j0, j1 int) {
	for i := i0; i < i1; i++ {
		for j := j0; j < j1; j++ {
			copy(dst[j*dstStride+2*i:][:2], src[i*srcStride+2*j:][:2])
		}
	}
}

var nativeLittleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1
