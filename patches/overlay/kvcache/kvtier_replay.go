//go:build kvtier_replay

package kvcache

import "math"

// KVTierEmpty frees all cells of sequences 0 … sequences-1 and sets every row to zero, as after Init.
func (c *Causal) KVTierEmpty(sequences int) {
	for seq := range sequences {
		_ = c.Remove(seq, 0, math.MaxInt32)
	}
	cells := c.KVTierAllCells()
	for layer := range c.keys {
		for _, v := range []bool{false, true} {
			_, rowBytes, _ := c.tierTensor(layer, v)
			c.KVTierWrite(layer, v, cells, KVTierChunk{Data: make([]byte, rowBytes*len(cells))})
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
	rows := make([][]byte, len(cells))
	for _, l := range c.KVTierLayers() {
		for _, v := range []bool{false, true} {
			_, rowBytes, _ := c.tierTensor(l.Layer, v)
			all := make([]byte, rowBytes*len(cells))
			c.KVTierRead(l.Layer, v, cells, all)
			for i := range rows {
				rows[i] = append(rows[i], all[i*rowBytes:(i+1)*rowBytes]...)
			}
		}
	}
	return rows
}

// KVTierSetRows writes what KVTierRows returned.
func (c *Causal) KVTierSetRows(cells []int32, rows [][]byte) {
	at := 0
	for _, l := range c.KVTierLayers() {
		for _, v := range []bool{false, true} {
			_, rowBytes, _ := c.tierTensor(l.Layer, v)
			var all []byte
			for _, row := range rows {
				all = append(all, row[at:at+rowBytes]...)
			}
			c.KVTierWrite(l.Layer, v, cells, KVTierChunk{Data: all})
			at += rowBytes
		}
	}
}
