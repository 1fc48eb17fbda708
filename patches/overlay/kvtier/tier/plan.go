package tier

import (
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// fetchPlan is which blocks to read: those that hold positions [from, rows), from on or before the first wanted.
type fetchPlan struct {
	blocks  []*tierpb.BlockInfo
	from    int
	rows    int
	bytes   uint64
	seconds float64

	windowSeconds float64 // for the windows that end at rows
	differs       bool    // the last of the matching blocks goes on, otherwise than the prompt
}

func planFetch(blocks []*tierpb.BlockInfo, memory, most int) fetchPlan {
	p := fetchPlan{from: memory / kvtier.BlockTokens * kvtier.BlockTokens}
	first := 0
	for _, b := range blocks {
		rows := min(int(b.Rows), most-first)
		if rows <= 0 {
			break
		}
		if first >= p.from {
			p.blocks = append(p.blocks, b)
			p.bytes += max(b.StoredBytes, b.RawBytes) // what is copied, whatever the tier keeps
			p.seconds += b.ExpectedSeconds
		}
		p.rows, p.differs = first+rows, b.Rows < b.BlockRows
		if rows < kvtier.BlockTokens {
			break
		}
		first += kvtier.BlockTokens
	}
	return p
}

// until is the plan for the rows before a position.
func (p fetchPlan) until(end int) fetchPlan {
	if end < p.rows {
		p = p.first(max(0, end-p.from+kvtier.BlockTokens-1) / kvtier.BlockTokens)
		p.rows = end
	}
	return p
}

// end is why what is stored of a prompt ends before all the rows that could be restored; nothing where it does not.
func (p fetchPlan) end(most int) shortfall {
	switch {
	case p.rows >= most:
		return shortfall{}
	case p.rows == 0:
		return shortfall{reason: nothingStored}
	case p.differs:
		return shortfall{storedDiffers, p.rows}
	}
	return shortfall{storedEnds, p.rows}
}

// ownBytes is the memory that reading a block takes. What a tier holds encoded, or where a client does not read, is made
// readable in the RAM tier when there is room there, and then takes none.
func ownBytes(b *tierpb.BlockInfo) int {
	if b.Tier == tierpb.Tier_TIER_RAM {
		return 0
	}
	return int(max(b.StoredBytes, b.RawBytes))
}

func (p fetchPlan) ownBytes() (bytes int) {
	for _, b := range p.blocks {
		bytes += ownBytes(b)
	}
	return bytes
}

// within is the plan for the leading blocks that take no more than so many bytes.
func (p fetchPlan) within(bytes int) fetchPlan {
	n := 0
	for ; n < len(p.blocks); n++ {
		if bytes -= ownBytes(p.blocks[n]); bytes < 0 {
			break
		}
	}
	return p.first(n)
}

// first is the plan for the first n blocks only.
func (p fetchPlan) first(n int) fetchPlan {
	if n == len(p.blocks) {
		return p
	}
	for _, b := range p.blocks[n:] {
		p.bytes -= max(b.StoredBytes, b.RawBytes)
		p.seconds -= b.ExpectedSeconds
	}
	p.blocks, p.rows = p.blocks[:n], p.from+n*kvtier.BlockTokens
	return p
}
