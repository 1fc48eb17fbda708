package ollamarunner

import (
	"encoding/binary"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/model/input"
)

const (
	// tierCatchUpBytes bounds what is copied, under the lock, of content that is about to be lost, and the memory of all
	// such copies that are not stored yet.
	tierCatchUpBytes = 256 << 20

	// tierProgressTokens is how many new rows of a request in progress are worth a snapshot of their own, if it has also
	// been computing for as long as the configuration says: a long prefill is kept when the runner is killed. What takes
	// less waits for the end of the request, since storing beside computing takes cores from it.
	tierProgressTokens = 512

	// tierNoTaint is the taint of a slot all of whose rows are exact.
	tierNoTaint = math.MaxInt32
)

// tierSlot is what the tiering knows of a slot of the runner's cache. Guarded by Server.mu.
type tierSlot struct {
	id      int
	lineage *tierLineage   // the content now
	older   []*tierLineage // earlier contents that still have blocks to be copied from rows that the slot kept

	// taint is the first position whose K/V is no longer what its tokens alone would give: a context shift turns K in
	// place and keeps V that attended to tokens since discarded. Nothing from there on is ever published.
	taint int32

	computed int32 // rows that have been computed once the batch now being launched is
	memory   int32 // of the current request: rows found in the slot, rows after restoring, tokens of the prompt
	resumed  int32
	prompt   int32

	// beside counts the rows, of every sequence, that are computed between the current request's load and its first token.
	beside int
}

// tierLineage is one content of a slot, from when it was loaded until some of it is discarded. Guarded by Server.mu.
type tierLineage struct {
	slot          int
	tokens        []byte // of the rows that may be published
	keys          []kvtier.Key
	saved         int          // rows of whole blocks that are stored or in blocks
	tail          int          // rows, when a tail block has been added
	progressAt    int          // rows from which on a snapshot in progress is due
	progressSince time.Time    // when the last one was, or the computing began
	present       int32        // rows still in the slot's cells
	refused       bool         // a finished content that the store did not take
	finished      bool         // no more rows will come: the tail may be stored
	closed        bool         // it is no longer the slot's content: blocks is all that is left to do
	after         []int        // batches that must have been computed before the rows are read
	blocks        []*tierBlock // to be stored, in order
}

// tierBlock is one block on its way from the cells to a file. Guarded by Server.mu until copied or lost.
type tierBlock struct {
	first, rows int
	tokens      []byte
	key, parent kvtier.Key
	layout      *kvtier.Layout
	file        []byte // its bytes, nil until there is memory for them
	path        string // of the reserved file
	id          uint64 // its reservation
	copied      bool
	lost        bool
}

func newTierSlot(id int) tierSlot {
	return tierSlot{id: id, taint: tierNoTaint, lineage: newTierLineage(id)}
}

func newTierLineage(slot int) *tierLineage {
	return &tierLineage{slot: slot, present: math.MaxInt32, progressAt: tierProgressTokens, progressSince: time.Now()}
}

// note records that inputs are in the slot, exact up to the taint, and computed once the batches in after are.
func (ts *tierSlot) note(inputs []*input.Input, after []int) {
	l := ts.lineage
	rows := min(len(inputs), int(ts.taint))
	if have := len(l.tokens) / 4; rows < have {
		// A stop string was cut off the end. The blocks already planned stay true: they name the tokens they hold.
		l.tokens = l.tokens[: 4*rows : 4*rows]
		l.keys = l.keys[:min(len(l.keys), rows/kvtier.BlockTokens)]
		l.saved = min(l.saved, wholeRows(rows))
	}
	for _, in := range inputs[len(l.tokens)/4 : rows] {
		if in.Multimodal != nil || in.MultimodalHash != 0 {
			break
		}
		l.tokens = binary.LittleEndian.AppendUint32(l.tokens, uint32(in.Token))
	}
	l.after = after
}

// batched is called when a batch of so many rows is about to be launched, before progress.
func (ts *tierSlot) batched(rows int) {
	if ts.computed < ts.prompt {
		ts.beside += rows
	}
}

// progress is called when a batch is about to be launched, with the slot's inputs including that batch's: what was
// there the time before has been computed once the batches in after are.
func (ts *tierSlot) progress(t *kvTier, inputs []*input.Input, after []int) {
	computed := int(ts.computed)
	ts.computed = int32(len(inputs))
	// On a device, a batch without outputs may still be running when it counts as computed: wait for the request's end.
	if t.config.Snapshot && t.onHost && ts.lineage.progressDue(t, computed) && computed <= len(inputs) && t.client.Up() {
		ts.lineage.progressed(computed)
		ts.note(inputs[:computed], after)
		t.work.add(ts.lineage)
	}
}

func (l *tierLineage) progressDue(t *kvTier, rows int) bool {
	return rows >= l.progressAt && time.Since(l.progressSince) >= t.config.Progress
}

// progressed notes that nothing new is to be stored of so many rows.
func (l *tierLineage) progressed(rows int) {
	l.progressAt, l.progressSince = rows+tierProgressTokens, time.Now()
}

// load starts a new lineage after a request has been given the slot: rows up to resumed are in the cells.
func (ts *tierSlot) load(memory, resumed, prompt int32) {
	if memory <= ts.taint {
		ts.taint = tierNoTaint // what a restore added is exact
	}
	if resumed > memory {
		ts.lineage.saved = wholeRows(int(resumed)) // they came from the store
	}
	ts.lineage.progressed(int(resumed))
	ts.computed, ts.memory, ts.resumed, ts.prompt = resumed, memory, resumed, prompt
}

// discard is called before the slot keeps only its first rows: blocks that would lose rows are copied into memory, as
// far as the bound allows, and a new lineage begins. The caller holds Server.mu.
func (ts *tierSlot) discard(t *kvTier, keep int32) {
	current := ts.lineage
	current.finished = true
	if t.up() && !current.refused {
		current.plan(t)
	}
	current.closed = true
	ts.lineage = newTierLineage(ts.id)
	ts.computed = 0

	ts.older = append(ts.older, current)
	ts.older = slices.DeleteFunc(ts.older, func(l *tierLineage) bool { return len(l.blocks) == 0 })
	budget := tierCatchUpBytes - t.held()
	for _, l := range ts.older {
		if l.atRisk(keep) {
			if t.onHost {
				t.batches.wait(l.after)
			} else {
				t.quiesce()
			}
			budget = t.catchUp(l, keep, budget)
		}
		l.present = min(l.present, keep)
		t.work.add(l)
	}
}

// held is the memory of copies that still wait to be stored.
func (t *kvTier) held() (bytes int) {
	for i := range t.slots {
		for _, l := range t.slots[i].older {
			for _, b := range l.blocks {
				if b.copied {
					bytes += len(b.file)
				}
			}
		}
	}
	return bytes
}

// atRisk reports whether blocks lose rows when the slot keeps only the first of them.
func (l *tierLineage) atRisk(keep int32) bool {
	return slices.ContainsFunc(l.blocks, func(b *tierBlock) bool { return b.losesRows(keep) })
}

func (b *tierBlock) losesRows(keep int32) bool {
	return !b.copied && !b.lost && b.first+b.rows > int(keep)
}

// catchUp copies the blocks that lose rows, in order, until the bound is reached; a chain has no holes, so the rest is
// lost. It returns what is left of the bound.
func (t *kvTier) catchUp(l *tierLineage, keep int32, budget int) int {
	for i, b := range l.blocks {
		if !b.losesRows(keep) {
			continue
		}
		if budget < b.layout.FileBytes {
			slog.Info("kv tiering: content discarded before it was stored", "slot", l.slot, "from", b.first, "blocks", len(l.blocks)-i)
			for _, b := range l.blocks[i:] {
				b.lost = b.lost || b.losesRows(keep)
			}
			return 0
		}
		if b.file == nil {
			budget -= b.layout.FileBytes
			b.file = make([]byte, b.layout.FileBytes)
		}
		t.export(l, b)
	}
	return budget
}

// fork makes the slot inherit the first rows of another.
func (ts *tierSlot) fork(src *tierSlot, rows int32) {
	ts.taint = tierNoTaint
	if src.taint < rows {
		ts.taint = src.taint
	}
}

// plan adds the blocks that are complete and not yet planned, and the tail if the lineage has ended.
func (l *tierLineage) plan(t *kvTier) {
	rows := len(l.tokens) / 4
	if l.closed || rows < t.config.MinTokens || !t.config.Snapshot {
		return
	}
	for len(l.keys) < rows/kvtier.BlockTokens {
		at := 4 * len(l.keys) * kvtier.BlockTokens
		l.keys = append(l.keys, kvtier.BlockKey(l.parent(t, len(l.keys)), l.tokens[at:at+4*kvtier.BlockTokens], nil))
	}
	for ; l.saved+kvtier.BlockTokens <= rows; l.saved += kvtier.BlockTokens {
		l.add(t, l.saved, kvtier.BlockTokens)
		l.tail = 0
	}
	if tail := rows - l.saved; l.finished && tail > l.tail {
		l.add(t, l.saved, tail)
		l.tail = tail
	}
}

func (l *tierLineage) parent(t *kvTier, block int) kvtier.Key {
	if block == 0 {
		return t.namespace
	}
	return l.keys[block-1]
}

func (l *tierLineage) add(t *kvTier, first, rows int) {
	b := &tierBlock{
		first: first, rows: rows, layout: t.layout(rows),
		tokens: l.tokens[4*first : 4*(first+rows) : 4*(first+rows)],
		parent: l.parent(t, first/kvtier.BlockTokens),
	}
	if rows == kvtier.BlockTokens {
		b.key = l.keys[first/kvtier.BlockTokens]
	} else {
		b.key = kvtier.BlockKey(b.parent, b.tokens, nil)
	}
	l.blocks = append(l.blocks, b)
}

// export copies a block's rows out of the cells into b.file. The caller holds Server.mu and the rows are computed.
func (t *kvTier) export(l *tierLineage, b *tierBlock) {
	cells := t.cache.KVTierCells(l.slot, int32(b.first), int32(b.first+b.rows))
	if cells == nil || b.first+b.rows > int(l.present) {
		b.lost = true
		return
	}
	for _, s := range b.layout.Segments {
		t.cache.KVTierPlane(s.Layer, s.V).Read(cells, b.file[s.Offset:s.Offset+s.Bytes])
	}
	b.copied = true
	replayExported(cells, b)
}

// wholeRows rounds down to whole blocks.
func wholeRows(rows int) int {
	return rows / kvtier.BlockTokens * kvtier.BlockTokens
}
