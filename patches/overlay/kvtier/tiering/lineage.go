package tiering

import (
	"math"
	"slices"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// lineage is one content of a slot, from when it was loaded until some of it is discarded. Guarded by the Host's lock.
type lineage struct {
	slot          int
	tokens        []byte // of the rows that may be published
	extras        []kvtier.Extra
	chain         []*link   // its whole blocks
	end           *link     // its tail, when that has been added
	saved         int       // rows of whole blocks that are stored or in blocks
	tail          int       // rows, when a tail block has been added
	windowsAt     int       // rows, up to where window blocks have been added
	progressAt    int       // rows from which on a snapshot in progress is due
	progressSince time.Time // when the last one was, or the computing began
	promptEnd     *promptEnd
	present       int      // rows still in the slot's cells
	refused       bool     // a finished content that the store did not take
	finished      bool     // no more rows will come: the tail may be stored
	closed        bool     // it is no longer the slot's content: blocks is all that is left to do
	after         []int    // batches that must have been computed before the rows are read
	blocks        []*block // to be stored, in order
}

// block is one block on its way from the cells to a file. Guarded by the Host's lock until copied or lost.
type block struct {
	first, rows int
	link        *link // that it is or, of a window block, hangs on
	layout      *kvtier.Layout
	part        *windowPart         // of a window block, whose rows are not all of those of the block at first
	others      []*block            // of the last block of a window: those before it
	payload     []byte              // its rows, nil until there is memory for them
	crcs        []uint32            // of its segments, once they are known
	file        *tierpb.Reservation // nil: none is reserved
	copied      bool
	lost        bool
}

func newLineage(slot int) *lineage {
	return &lineage{slot: slot, present: math.MaxInt, progressAt: progressTokens, progressSince: time.Now()}
}

func (l *lineage) progressDue(t *Tiering, rows int) bool {
	return rows >= l.progressAt && time.Since(l.progressSince) >= t.config.Progress
}

// progressed notes that nothing new is to be stored of so many rows.
func (l *lineage) progressed(rows int) {
	l.progressAt, l.progressSince = rows+progressTokens, time.Now()
}

// atRisk reports whether blocks lose rows when the slot keeps only the first of them.
func (l *lineage) atRisk(keep int) bool {
	return slices.ContainsFunc(l.blocks, func(b *block) bool { return b.losesRows(keep) })
}

// losesRows reports whether a block that is not copied loses rows when the slot keeps only the first of them. A window loses
// some as soon as the slot goes on.
func (b *block) losesRows(keep int) bool {
	return !b.copied && !b.lost && (b.part != nil || b.first+b.rows > keep)
}

// plan adds the blocks that are complete and not yet planned, and the tail if the lineage has ended.
func (l *lineage) plan(t *Tiering) {
	rows := t.storable(l.slot, len(l.tokens)/4)
	if l.closed || rows < t.config.MinTokens || !t.config.Snapshot {
		return
	}
	l.follow(t, rows/kvtier.BlockTokens)
	for ; l.saved+kvtier.BlockTokens <= rows; l.saved += kvtier.BlockTokens {
		l.add(t, l.saved, kvtier.BlockTokens)
		l.tail = 0
	}
	if tail := rows - l.saved; l.finished && tail > l.tail {
		l.add(t, l.saved, tail)
		l.tail = tail
	}
	l.planWindows(t, rows)
	l.planPromptEnd(t, rows)
}

// follow has the links of so many whole blocks; what the slot kept of an earlier content are the same ones.
func (l *lineage) follow(t *Tiering, blocks int) {
	kept := t.slots[l.slot].kept
	for n := len(l.chain); n < blocks; n++ {
		k := l.linkOf(n*kvtier.BlockTokens, kvtier.BlockTokens)
		if n < len(kept) && kept[n].same(k) && (n == 0 || kept[n].before == k.before) {
			k = kept[n]
		}
		l.chain = append(l.chain, k)
	}
}

// linkOf is a new link of so many rows, after those of the chain before it.
func (l *lineage) linkOf(first, rows int) *link {
	k := &link{
		first: first, rows: rows, extras: kvtier.ExtrasOf(l.extras, first, rows),
		tokens: l.tokens[4*first : 4*(first+rows) : 4*(first+rows)],
	}
	if n := first / kvtier.BlockTokens; n > 0 {
		k.before = l.chain[n-1]
	}
	return k
}

func (l *lineage) add(t *Tiering, first, rows int) {
	k := l.on(first/kvtier.BlockTokens, first+rows)
	if rows < kvtier.BlockTokens {
		l.end = k
	}
	b := &block{first: first, rows: rows, link: k, layout: t.layout(rows, nil)}
	l.blocks = append(l.blocks, b)
}

// export copies a block's rows out of the cells into b.payload. The caller holds the Host's lock and the rows are computed.
func (t *Tiering) export(l *lineage, b *block) {
	if b.part != nil {
		t.exportWindow(l, b)
		return
	}
	cells := t.rows.Cells(l.slot, b.first, b.first+b.rows)
	if cells == nil || b.first+b.rows > l.present {
		b.lost = true
		return
	}
	for i, s := range b.layout.Segments {
		t.rows.Read(i, cells, b.payload[s.Offset:s.Offset+s.Bytes])
	}
	b.copied = true
	if w, ok := t.host.(Witness); ok {
		w.Exported(b.first, cells)
	}
}

// wholeRows rounds down to whole blocks.
func wholeRows(rows int) int {
	return rows / kvtier.BlockTokens * kvtier.BlockTokens
}
