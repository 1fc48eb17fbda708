//go:build kvtier_replay

package ollamarunner

import (
	"encoding/binary"
	"encoding/json"
	"hash/fnv"
	"net/http"
	"slices"
	"time"

	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/model"
	"github.com/ollama/ollama/model/input"
)

// replayCell is what was computed into a cell last: a token at a position, on top of rows whose tokens the chain names.
type replayCell struct {
	pos, token int32
	chain      uint64
	shifted    bool // by a context shift since, or on top of such a row: what it is worth is not known
	junk       bool // of a sequence that had ended before its batch was launched
}

func replayChain(parent uint64, token int32) uint64 {
	h := fnv.New64a()
	_ = binary.Write(h, binary.LittleEndian, parent)
	_ = binary.Write(h, binary.LittleEndian, token)
	return h.Sum64()
}

// wrote notes what a batch that is launched now computes, and checks what it computes it from: every row that a query
// sees must have been computed by then, or be in the same batch, and hold that sequence's earlier tokens. What is computed
// for a sequence that has ended meanwhile is junk: its earlier rows may have gone, and nobody may use the new one.
func (r *replayRecord) wrote(id int, b *replayBatch, alive map[int]bool) {
	for i, cell := range b.cells {
		r.cells[cell] = replayCell{pos: b.positions[i], token: b.tokens[i], junk: !alive[b.sequences[i]]}
	}
	first := make(map[int]int32)
	for i, seq := range b.sequences {
		if _, ok := first[seq]; !ok && alive[seq] {
			first[seq] = b.positions[i]
		}
	}
	for seq, from := range first {
		var parent replayCell
		for pos, cell := range b.before[seq] {
			c := r.cells[cell]
			chain := replayChain(parent.chain, c.token)
			switch {
			case pos >= int(from):
				c.chain, c.shifted = chain, parent.shifted
				r.cells[cell] = c
			case !c.shifted && (c.junk || c.chain != chain || int(c.pos) != pos):
				r.wrong("batch %d of slot %d: the row at %d is another sequence's", id, seq, pos)
			}
			parent = c
		}
	}
}

// given notes rows that were restored.
func (r *replayRecord) given(cells []int32, inputs []*input.Input, from int) {
	var chain uint64
	for pos, cell := range cells {
		chain = replayChain(chain, inputs[pos].Token)
		if pos >= from {
			r.cells[cell] = replayCell{pos: int32(pos), token: inputs[pos].Token, chain: chain}
		}
	}
}

// compareTokens checks the tokens that a slot says are in memory against those that were computed.
func (r *replayRecord) compareTokens(when string, slot *InputCacheSlot) {
	cells := r.rows.Cells(slot.Id, 0, len(slot.Inputs))
	if cells == nil && len(slot.Inputs) > 0 {
		r.wrong("%s: a row of slot %d is missing", when, slot.Id)
	}
	var chain uint64
	for pos, cell := range cells {
		c := r.cells[cell]
		token := slot.Inputs[pos].Token
		chain = replayChain(chain, token)
		if c.shifted {
			return
		}
		r.report.Compared++
		if c.junk || c.token != token || c.chain != chain || int(c.pos) != pos {
			r.wrong("%s: the row at %d of slot %d is of token %d (of position %d), not %d", when, pos, slot.Id, c.token, c.pos, token)
			return
		}
	}
}

// compute computes a batch once more, in the cells that the cache's metadata now gives it.
func (r *replayRecord) compute(b *replayBatch, outputs []int32) error {
	ctx := r.server.model.Backend().NewContext()
	defer ctx.Close()
	batch := input.Batch{Positions: b.positions, Sequences: b.sequences}
	batch.Inputs = ctx.Input().FromInts(b.tokens, len(b.tokens))
	batch.Outputs = ctx.Input().FromInts(outputs, len(outputs))
	ctx.SetBatchSize(len(b.tokens))
	out, err := model.Forward(ctx, r.server.model, batch)
	if err != nil {
		return err
	}
	ctx.Compute(out)
	if out.Floats() == nil {
		r.server.model.Backend().(interface{ KVTierSync() }).KVTierSync()
	}
	if cells := r.tiered.BatchCells(); !slices.Equal(cells, b.cells) {
		r.wrong("a batch has other cells the second time: %v, not %v", cells, b.cells)
	}
	return nil
}

// again empties the cache, does everything once more and compares the rows. The caller holds Server.mu; nothing is pending.
func (r *replayRecord) again() {
	for i := range r.server.cache.slots {
		r.compareTokens("idle", &r.server.cache.slots[i])
	}
	all := r.rows.All()
	rows := r.rows.Content(all)
	r.rows.Empty(len(r.server.cache.slots))
	for _, e := range r.events {
		if err := e.again(); err != nil {
			r.wrong("%s: %v", e.what, err)
		}
	}
	for i, row := range r.rows.Content(all) {
		if c := r.cells[int32(i)]; !c.junk && string(row) != string(rows[i]) {
			r.wrong("cell %d (position %d) holds other bytes than its last batch computes", i, c.pos)
		}
	}
}

// replayAnswer does everything again once the runner is idle, when the request says so, and answers with the report.
func replayAnswer(w http.ResponseWriter, request *http.Request) bool {
	if !request.URL.Query().Has("replay") {
		return false
	}
	r := recording()
	if r == nil {
		http.Error(w, "this model is not recorded", http.StatusNotFound)
		return true
	}
	r.mu.Unlock()
	if t := tiering.Active(); t != nil {
		t.Drain()
	}
	for { // locks in the order of all others
		r.server.mu.Lock()
		r.mu.Lock()
		if len(r.open) == 0 && r.server.allNil() {
			break
		}
		r.mu.Unlock()
		r.server.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	defer r.server.mu.Unlock()
	defer r.mu.Unlock()
	r.again()
	_ = json.NewEncoder(w).Encode(r.report)
	return true
}
