//go:build kvtier_replay

package kvcache

import (
	"math"

	"github.com/ollama/ollama/kvtier/rows"
)

// KVTierEmpty frees all cells of sequences 0 … sequences-1 and sets every row to zero, as after Init.
func (c *Causal) KVTierEmpty(sequences int) {
	for seq := range sequences {
		_ = c.Remove(seq, 0, math.MaxInt32)
	}
	cells := c.KVTierAllCells()
	for layer := range c.keys {
		for _, v := range []bool{false, true} {
			plane := c.KVTierPlane(layer, v)
			plane.Write(cells, rows.Chunk{Data: make([]byte, plane.RowBytes*len(cells))})
		}
	}
}

// KVTierAllCells returns every cell, free or not.
func (c *Causal) KVTierAllCells() []int32 {
	cells := make([]int32, len(c.cells))
	for i := range cells {
		cells[i] = int32(i)
	}
	return cells
}

// KVTierRows returns the rows of cells over all layers, K then V of each, in the order of cells: rows[i] is cells[i]'s.
func (c *Causal) KVTierRows(cells []int32) [][]byte {
	out := make([][]byte, len(cells))
	for _, l := range c.KVTierLayers() {
		for _, v := range []bool{false, true} {
			plane := c.KVTierPlane(l.Layer, v)
			all := make([]byte, plane.RowBytes*len(cells))
			plane.Read(cells, all)
			for i := range out {
				out[i] = append(out[i], all[i*plane.RowBytes:(i+1)*plane.RowBytes]...)
			}
		}
	}
	return out
}

// KVTierSetRows writes what KVTierRows returned.
func (c *Causal) KVTierSetRows(cells []int32, content [][]byte) {
	at := 0
	for _, l := range c.KVTierLayers() {
		for _, v := range []bool{false, true} {
			plane := c.KVTierPlane(l.Layer, v)
			var all []byte
			for _, row := range content {
				all = append(all, row[at:at+plane.RowBytes]...)
			}
			plane.Write(cells, rows.Chunk{Data: all})
			at += plane.RowBytes
		}
	}
}
