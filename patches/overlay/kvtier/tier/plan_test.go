package tier

import (
	"testing"

	"github.com/ollama/ollama/kvtier/tierpb"
)

func TestPlanFetchTakesTheUnbrokenRunUpToTheLastTokenButOne(t *testing.T) {
	block := func(rows uint32) *tierpb.BlockInfo {
		return &tierpb.BlockInfo{Rows: rows, BlockRows: 64, StoredBytes: 800, RawBytes: 1000, ExpectedSeconds: 0.5}
	}
	for name, c := range map[string]struct {
		blocks            []*tierpb.BlockInfo
		memory, most      int
		from, rows, fetch int
	}{
		"all":                  {[]*tierpb.BlockInfo{block(64), block(64), block(9)}, 0, 500, 0, 137, 3},
		"never the last token": {[]*tierpb.BlockInfo{block(64), block(64)}, 0, 127, 0, 127, 2},
		"memory has a block":   {[]*tierpb.BlockInfo{block(64), block(64), block(9)}, 70, 500, 64, 137, 2},
		"a partial block ends": {[]*tierpb.BlockInfo{block(64), block(30), block(64)}, 0, 500, 0, 94, 2},
		"nothing to gain":      {[]*tierpb.BlockInfo{block(64)}, 64, 500, 64, 64, 0},
	} {
		p := planFetch(c.blocks, c.memory, c.most)
		if p.from != c.from || p.rows != c.rows || len(p.blocks) != c.fetch || p.bytes != uint64(1000*c.fetch) {
			t.Errorf("%s: from %d rows %d blocks %d", name, p.from, p.rows, len(p.blocks))
		}
	}
}
