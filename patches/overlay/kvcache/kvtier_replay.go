//go:build kvtier_replay

package kvcache

import "github.com/ollama/ollama/kvtier/rows"

// Empty frees all cells of slots 0 … slots-1 and sets every row to zero, as after Init.
func (r *KVTierRows) Empty(slots int) {
	for slot := range slots {
		r.Drop(slot, 0)
	}
	cells := r.All()
	for _, p := range r.planes {
		p.Write(cells, rows.Chunk{Data: make([]byte, p.RowBytes*len(cells))})
	}
}

// All returns every cell, free or not.
func (r *KVTierRows) All() []int32 {
	cells := make([]int32, len(r.children[0].cells))
	for i := range cells {
		cells[i] = int32(i)
	}
	return cells
}

// Content returns the rows of cells over all segments, in the order of cells: content[i] is cells[i]'s.
func (r *KVTierRows) Content(cells []int32) [][]byte {
	content := make([][]byte, len(cells))
	for _, p := range r.planes {
		all := make([]byte, p.RowBytes*len(cells))
		p.Read(cells, all)
		for i := range content {
			content[i] = append(content[i], all[i*p.RowBytes:(i+1)*p.RowBytes]...)
		}
	}
	return content
}

// SetContent writes what Content returned.
func (r *KVTierRows) SetContent(cells []int32, content [][]byte) {
	at := 0
	for _, p := range r.planes {
		var all []byte
		for _, row := range content {
			all = append(all, row[at:at+p.RowBytes]...)
		}
		p.Write(cells, rows.Chunk{Data: all})
		at += p.RowBytes
	}
}
