package kvcache

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/ml"
)

// What the KV tiering asks of a causal cache before it is tiered: whether it can be, its geometry, where its rows lie.

// KVTierLayer is the geometry of one layer's rows.
type KVTierLayer struct {
	Layer                       int
	KVHeads, KHeadDim, VHeadDim int
	KRowBytes, VRowBytes        int
}

// KVTierType is the type of all K and V, as blocks name it, or "".
func (c *Causal) KVTierType() string {
	switch c.DType {
	case ml.DTypeF16:
		return "f16"
	case ml.DTypeQ80:
		return "q8_0"
	case ml.DTypeQ40:
		return "q4_0"
	}
	return ""
}

// KVTierUnsupported returns why the rows of this cache can't be tiered, or "".
func (c *Causal) KVTierUnsupported() string {
	switch {
	case c.swaWindowSize != math.MaxInt32 || c.swaMemorySize != math.MaxInt32:
		return "sliding window attention"
	case c.chunkSize != 0:
		return "chunked attention"
	case c.KVTierType() == "":
		return "K/V cache of another type than f16, q8_0 and q4_0"
	case c.DType != ml.DTypeF16 && c.config.PermutedV:
		return "V is transposed and quantised"
	case len(c.keys) == 0 || len(c.keys) != len(c.values):
		return "no K/V layers"
	}
	for layer, key := range c.keys {
		value, ok := c.values[layer]
		if !ok || key.DType() != c.DType || value.DType() != c.DType {
			return fmt.Sprintf("layer %d has no plain K and V", layer)
		}
		for _, t := range []ml.Tensor{key, value} {
			if _, ok := t.(rows.Tensor); !ok {
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
			Layer: layer, KVHeads: key.Dim(1), KHeadDim: key.Dim(0), VHeadDim: vHeadDim,
			KRowBytes: c.tierPlane(layer, false).RowBytes, VRowBytes: c.tierPlane(layer, true).RowBytes,
		})
	}
	slices.SortFunc(layers, func(a, b KVTierLayer) int { return a.Layer - b.Layer })
	return layers
}

// KVTierPlacement says of every layer whether its rows lie in host memory (h) or on a device (d).
func (c *Causal) KVTierPlacement() string {
	var s strings.Builder
	for _, l := range c.KVTierLayers() {
		if c.keys[l.Layer].(rows.Tensor).KVTierHost() != nil {
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
		if c.keys[layer].(rows.Tensor).KVTierHost() == nil || c.values[layer].(rows.Tensor).KVTierHost() == nil {
			return false
		}
	}
	return true
}

// KVTierBatchCells returns a copy of the cells that the last StartForward assigned to its batch.
func (c *Causal) KVTierBatchCells() []int32 {
	return slices.Clone(c.tierLocs)
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
