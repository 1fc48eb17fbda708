package kvcache

import "github.com/ollama/ollama/ml"

// exactAttnPositions is a mask that can be told the positions of its cells.
type exactAttnPositions interface {
	ExactAttnSetPositions(ctx ml.Context, positions []int32)
}

// exactAttnOrdered tells the mask of a batch which position each of its cells holds, -1 where it holds none.
func (c *Causal) exactAttnOrdered(ctx ml.Context, mask ml.Tensor) ml.Tensor {
	if m, ok := mask.(exactAttnPositions); ok {
		positions := make([]int32, 0, c.curCellRange.max-c.curCellRange.min+1)
		for _, cell := range c.cells[c.curCellRange.min : c.curCellRange.max+1] {
			position := cell.pos
			if len(cell.sequences) == 0 {
				position = -1
			}
			positions = append(positions, position)
		}
		m.ExactAttnSetPositions(ctx, positions)
	}
	return mask
}
