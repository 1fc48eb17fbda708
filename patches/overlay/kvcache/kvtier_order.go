package kvcache

import "github.com/ollama/ollama/ml"

// tierPositions is a mask that can be told the positions of its cells.
type tierPositions interface {
	KVTierSetPositions(ctx ml.Context, positions []int32)
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

// tierOrdered tells the mask of a batch which position each of its cells holds, -1 where it holds none.
func (c *Causal) tierOrdered(ctx ml.Context, mask ml.Tensor) ml.Tensor {
	if m, ok := mask.(tierPositions); ok {
		positions := make([]int32, 0, c.curCellRange.max-c.curCellRange.min+1)
		for _, cell := range c.cells[c.curCellRange.min : c.curCellRange.max+1] {
			position := cell.pos
			if len(cell.sequences) == 0 {
				position = -1
			}
			positions = append(positions, position)
		}
		m.KVTierSetPositions(ctx, positions)
	}
	return mask
}
