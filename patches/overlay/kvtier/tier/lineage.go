package tier

import (
	"math"
	"slices"
	"time"

	"github.com/ollama/ollama/kvtier"
)

// lineage is one content of a slot, from when it was loaded until some of it is discarded. Guarded by the Host's lock.
type lineage struct {
	slot          int
	tokens        []byte // of the rows that may be published
	extras        []kvtier.Extra
	keys          []kvtier.Key
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
	tokens      []byte
	extras      []kvtier.Extra
	key, parent kvtier.Key
	layout      *kvtier.Layout
	part        *windowPart // of a window block, whose rows are not all of those of the block at first
	file        []byte      // its bytes, nil until there is memory for them
	path        string      // of the reserved file
	id          uint64      // its reservation
	copied      bool
	lost        bool
}

func newLineage(slot int) *lineage {
	return &lineage{slot: slot, present: math.MaxInt, progressAt: progressTokens, progressSince: time.Now()}
}

func (l *lineage) progressDue(t *Tier, rows int) bool {
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
func (l *lineage) plan(t *Tier) {
	rows := t.storable(l.slot, len(l.tokens)/4)
	if l.closed || rows < t.config.MinTokens || !t.config.Snapshot {
		return
	}
	for len(l.keys) < rows/kvtier.BlockTokens {
		l.keys = append(l.keys, l.key(t, len(l.keys)*kvtier.BlockTokens, kvtier.BlockTokens))
	}
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

func (l *lineage) parent(t *Tier, block int) kvtier.Key {
	if block == 0 {
		return t.namespace
	}
	return l.keys[block-1]
}

// key is that of the block that has so many rows from first on.
func (l *lineage) key(t *Tier, first, rows int) kvtier.Key {
	return kvtier.BlockKey(
		l.parent(t, first/kvtier.BlockTokens), l.tokens[4*first:4*(first+rows)], kvtier.ExtrasOf(l.extras, first, rows),
	)
}

func (l *lineage) add(t *Tier, first, rows int) {
	extras := kvtier.ExtrasOf(l.extras, first, rows)
	b := &block{
		first: first, rows: rows, extras: extras, layout: t.layout(rows, len(extras)),
		tokens: l.tokens[4*first : 4*(first+rows) : 4*(first+rows)],
		parent: l.parent(t, first/kvtier.BlockTokens),
	}
	if rows == kvtier.BlockTokens {
		b.key = l.keys[first/kvtier.BlockTokens]
	} else {
		b.key = l.key(t, first, rows)
	}
	l.blocks = append(l.blocks, b)
}

// export copies a block's rows out of the cells into b.file. The caller holds the Host's lock and the rows are computed.
func (t *Tier) export(l *lineage, b *block) {
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
		t.rows.Read(i, cells, b.file[s.Offset:s.Offset+s.Bytes])
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
