package kvcache

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/ml"
)

// KVTierCache is the K/V cache of a model as the KV tiering sees it: one causal cache, or several, each for other layers. Those
// that keep every row go through the same StartForward, Remove and CopyPrefix, and free no cell by themselves, so that they
// hold the same positions in the same cells; where they do not, KVTierRows finds nothing. Those of sliding windows drop rows,
// and have cells of their own. Recurrent layers have states instead of rows.
type KVTierCache struct {
	children []*Causal
	states   KVTierStates // nil where no layer is recurrent
}

// KVTierStates are the states of recurrent layers, as stock keeps them of some positions (checkpoints). What the runner goes on
// with at such a position is one row that has all states; which of stock's checkpoints it is, its cell. The rest is as in
// tier.WindowRows.
type KVTierStates interface {
	Layers(child int) []KVTierLayer
	Places() int // for checkpoints
	ComputedBy() string
	OnHost() bool

	// Checkpoints returns the positions that a slot can go on from.
	Checkpoints(slot int) []int

	Cells(slot, from, to int) []int32
	Read(segment int, cells []int32, dst []byte)
	Write(segment int, cells []int32, chunk rows.Chunk)
	Occupy(slot, from int, cells []int32)
	Drop(slot, from int)
	Free(slot int, cells []int32, avoid map[int32]struct{}) bool
}

// tierHybrid is a cache that has states of recurrent layers beside rows. Upstream has one from v0.17.1 on
// (kvtier_recurrent.go).
type tierHybrid interface {
	tierHybrid() (rows *Causal, states KVTierStates, reason string)
}

// KVTierCacheOf returns a model's cache, or why its rows can't be tiered.
func KVTierCacheOf(cache Cache) (c *KVTierCache, reason string) {
	c = &KVTierCache{}
	switch outer := cache.(type) {
	case *Causal:
		c.children = []*Causal{outer}
	case *WrapperCache:
		for _, inner := range outer.caches {
			child, ok := inner.(*Causal)
			if _, encoder := inner.(*EncoderCache); encoder {
				return nil, "attention to images that no mask limits: a row depends on how its batch was cut"
			} else if !ok {
				return nil, fmt.Sprintf("cache of type %T, not supported yet", inner)
			}
			c.children = append(c.children, child)
		}
	case tierHybrid:
		child, states, reason := outer.tierHybrid()
		if reason != "" {
			return nil, reason
		}
		c.children, c.states = []*Causal{child}, states
	default:
		return nil, fmt.Sprintf("cache of type %T, not supported yet", cache)
	}
	whole := []Cache{cache}
	for _, child := range c.children {
		whole = append(whole, child)
	}
	for _, part := range whole {
		if unknown := tierUnknown(part); unknown != "" {
			return nil, fmt.Sprintf("cache of type %T, which may hold more than is known of: %s", part, unknown)
		}
	}
	if reason := c.unsupported(); reason != "" {
		return nil, reason
	}
	return c, ""
}

func (c *KVTierCache) unsupported() string {
	layers, cells := 0, 0
	for _, child := range c.children {
		if reason := child.tierUnsupported(); reason != "" {
			return reason
		}
		if child.tierDrops() {
			continue
		}
		if cells > 0 && len(child.cells) != cells {
			return "caches of several sizes"
		}
		cells = len(child.cells)
		layers += len(child.keys)
	}
	switch {
	case layers == 0:
		return "no layer that keeps every row"
	case !c.copiesColumns():
		return "V is transposed on a device that can't copy it exactly (OLLAMA_FLASH_ATTENTION=1 avoids that)"
	}
	return ""
}

// copiesColumns reports whether V's rows can be copied though its elements lie apart: else one element at a time would cross the
// bus, with the runner's lock held.
func (c *KVTierCache) copiesColumns() bool {
	for _, child := range c.children {
		for _, value := range child.values {
			if v := value.(tierTensor); child.config.PermutedV && v.KVTierHost() == nil && !v.KVTierCopiesColumns() {
				return false
			}
		}
	}
	return true
}

// tierDrops reports whether the cache drops rows that its layers no longer see.
func (c *Causal) tierDrops() bool { return c.swaMemorySize != math.MaxInt32 }

// kept are the children that keep every row.
func (c *KVTierCache) kept() []*Causal {
	return slices.DeleteFunc(slices.Clone(c.children), (*Causal).tierDrops)
}

// tierUnsupported returns why the rows of one cache can't be tiered, or "". It may be that of no layer.
func (c *Causal) tierUnsupported() string {
	switch {
	case tierTypes[c.DType] == "":
		return "K/V cache of another type than f16, q8_0 and q4_0"
	case c.DType != ml.DTypeF16 && c.config.PermutedV:
		return "V is transposed and quantised"
	case len(c.keys) != len(c.values):
		return "layers with one of K and V"
	}
	for layer, key := range c.keys {
		value, ok := c.values[layer]
		if !ok || key.DType() != c.DType || value.DType() != c.DType {
			return fmt.Sprintf("layer %d has no plain K and V", layer)
		}
		for _, t := range []ml.Tensor{key, value} {
			if _, ok := t.(tierTensor); !ok {
				return "backend without partial tensor access"
			}
		}
	}
	return ""
}

// tierTensor is what a backend's tensor must offer to be tiered.
type tierTensor interface {
	rows.Tensor
	rows.Columns

	// KVTierOnDevice reports whether a device writes the tensor, wherever its memory is.
	KVTierOnDevice() bool

	// KVTierCopiesColumns reports whether the device copies some cells of each element without changing a bit.
	KVTierCopiesColumns() bool
}

// tierSynchronous reports whether what was computed of a tensor is there for the CPU as soon as computing has returned.
func tierSynchronous(t ml.Tensor) bool {
	tensor := t.(tierTensor)
	return !tensor.KVTierOnDevice() && tensor.KVTierHost() != nil
}

// tierTypes are the types of K and V, as blocks name them.
var tierTypes = map[ml.DType]string{ml.DTypeF16: "f16", ml.DTypeQ80: "q8_0", ml.DTypeQ40: "q4_0"}

// Type is the type of all K and V, as blocks name it.
func (c *KVTierCache) Type() string { return tierTypes[c.children[0].DType] }

// KVTierLayer is the geometry of one layer's rows.
type KVTierLayer struct {
	Child, Layer                int
	Kind                        string // of its attention, as blocks name it: full, swa or chunked
	Window                      int    // positions that a window or a chunk has, 0 where there is none
	Drops                       bool   // what it no longer sees
	KVHeads, KHeadDim, VHeadDim int
	KRowBytes, VRowBytes        int
}

// Layers returns the geometry of every layer that has K/V, by child and by number.
func (c *KVTierCache) Layers() (layers []KVTierLayer) {
	for number, child := range c.children {
		kind, window := child.tierKind()
		for layer, key := range child.keys {
			value := child.values[layer]
			vHeadDim := value.Dim(0)
			if child.config.PermutedV {
				vHeadDim = value.Dim(1)
			}
			layers = append(layers, KVTierLayer{
				Child: number, Layer: layer, Kind: kind, Window: window, Drops: child.tierDrops(),
				KVHeads: key.Dim(1), KHeadDim: key.Dim(0), VHeadDim: vHeadDim,
				KRowBytes: child.tierPlane(layer, false).RowBytes, VRowBytes: child.tierPlane(layer, true).RowBytes,
			})
		}
	}
	slices.SortFunc(layers, func(a, b KVTierLayer) int {
		if a.Child != b.Child {
			return a.Child - b.Child
		}
		return a.Layer - b.Layer
	})
	return layers
}

func (c *Causal) tierKind() (kind string, window int) {
	switch {
	case c.chunkSize != 0:
		return "chunked", int(c.chunkSize)
	case c.swaWindowSize != math.MaxInt32:
		return "swa", int(c.swaWindowSize)
	}
	return "full", 0
}

// Tensors are K and V of all layers.
func (c *KVTierCache) Tensors() (tensors []ml.Tensor) {
	for _, child := range c.children {
		for layer := range child.keys {
			tensors = append(tensors, child.keys[layer], child.values[layer])
		}
	}
	return tensors
}

// ComputedBy says of every layer, in the order of Layers, whether the host computes its rows (h) or a device does (d). Where they
// lie says nothing of that: a device's may be in pinned memory of the host, and their bits are the same there.
func (c *KVTierCache) ComputedBy() string {
	var tensors []ml.Tensor
	for _, l := range c.Layers() {
		tensors = append(tensors, c.children[l.Child].keys[l.Layer])
	}
	return tierComputedBy(tensors)
}

func tierComputedBy(tensors []ml.Tensor) string {
	var s strings.Builder
	for _, t := range tensors {
		if t.(tierTensor).KVTierOnDevice() {
			s.WriteByte('d')
		} else {
			s.WriteByte('h')
		}
	}
	return s.String()
}

// States returns those of recurrent layers, or nil, and the number of their child: that after the last one's.
func (c *KVTierCache) States() (states KVTierStates, child int) { return c.states, len(c.children) }

// OnHost reports whether the CPU can access all rows, and states, directly, as soon as computing has returned. Rows that a device
// writes are never on the host so, not even in memory of the host: a batch without outputs returns before they are written.
func (c *KVTierCache) OnHost() bool {
	if c.states != nil && !c.states.OnHost() {
		return false
	}
	for _, child := range c.children {
		for layer := range child.keys {
			if !tierSynchronous(child.keys[layer]) || !tierSynchronous(child.values[layer]) {
				return false
			}
		}
	}
	return true
}

// BatchCells returns the cells that the last StartForward assigned to its batch in the children that keep every row: one for
// each row, and those that a child has assigned beside them, if they should ever differ.
func (c *KVTierCache) BatchCells() []int32 {
	kept := c.kept()
	cells := slices.Clone(kept[0].tierLocs)
	for _, child := range kept[1:] {
		for _, cell := range child.tierLocs {
			if !slices.Contains(kept[0].tierLocs, cell) {
				cells = append(cells, cell)
			}
		}
	}
	return cells
}

// tierPlane returns a layer's K or V.
func (c *Causal) tierPlane(layer int, v bool) rows.Plane {
	key := c.keys[layer]
	if !v {
		return rows.Plane{Tensor: key.(rows.Tensor), RowBytes: key.Stride(2), Cells: len(c.cells)}
	}
	value := c.values[layer]
	p := rows.Plane{Tensor: value.(rows.Tensor), RowBytes: value.Stride(2), Cells: len(c.cells)}
	if c.config.PermutedV {
		p.RowBytes, p.Permuted = value.Dim(1)*value.Dim(2)*value.Stride(0), true
	}
	return p
}
