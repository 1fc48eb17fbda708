package tier

import "github.com/ollama/ollama/kvtier"

// promptEnd are the windows that end before the last token of a prompt, from where the same prompt is gone on with when it comes
// again: a regenerated answer. They are in the cells from when the last batch of the prompt has been computed until the batch of the
// answer's first token is; by then stock has freed some of the cells, and may have given one to that token.
type promptEnd struct {
	end    int
	cells  [][]int32  // of each window, by number
	blocks [][]*block // of each window, with their rows; nil until they are copied
}

// beforeLaunch notes the windows when the prompt's last batch is about to be launched, and copies them before the next.
func (ts *slot) beforeLaunch(t *Tier, held int) {
	if ts.lineage.promptEnd != nil {
		ts.keepPromptEnd(t)
	} else if held == ts.prompt && len(t.model.Windows) > 0 {
		ts.notePromptEnd(t)
	}
}

// notePromptEnd notes where the windows lie that end before the prompt's last token, if they are wanted and not known to be stored.
func (ts *slot) notePromptEnd(t *Tier) {
	end := ts.prompt - 1
	restored := ts.resumed == end && ts.resumed > ts.memory
	if restored || end < max(1, t.config.MinTokens) || !t.config.Snapshot || !t.up() || t.refused.Load() {
		return
	}
	p := &promptEnd{end: end}
	for _, w := range t.model.Windows {
		if w.Checkpoints != nil {
			return // states are elsewhere
		}
		cells := w.Rows.Cells(ts.id, max(0, end-w.Size), end)
		if cells == nil {
			return
		}
		p.cells = append(p.cells, cells)
	}
	ts.lineage.promptEnd = p
}

// keepPromptEnd copies the rows that were noted, as far as there is memory for all of them.
func (ts *slot) keepPromptEnd(t *Tier) {
	p := ts.lineage.promptEnd
	if p == nil || p.blocks != nil {
		return
	}
	blocks, bytes := p.layOut(t)
	if bytes > catchUpBytes-t.held() {
		ts.lineage.promptEnd = nil
		return
	}
	if !t.model.OnHost {
		t.host.Quiesce()
	}
	for i := range t.model.Windows {
		for _, b := range blocks[i] {
			b.file = make([]byte, b.layout.FileBytes)
			for n, s := range b.layout.Segments {
				t.model.Windows[i].Rows.Read(n, b.part.block.Cells, b.file[s.Offset:s.Offset+s.Bytes])
			}
			b.copied = true
		}
	}
	p.blocks = blocks
}

// dropPromptEnd forgets what was noted and not copied.
func (ts *slot) dropPromptEnd() {
	if p := ts.lineage.promptEnd; p != nil && p.blocks == nil {
		ts.lineage.promptEnd = nil
	}
}

// layOut returns the blocks of each window, without what their tokens say, and how many bytes they take.
func (p *promptEnd) layOut(t *Tier) (blocks [][]*block, bytes int) {
	unknown := func(int) kvtier.Key { return kvtier.Key{} }
	for i := range t.model.Windows {
		w, of := &t.model.Windows[i], []*block(nil)
		for n, part := range windowParts(w, make([]byte, 4*p.end), unknown) {
			at := part.block.Position - max(0, p.end-w.Size)
			part.block.Cells = p.cells[i][at : at+part.block.Rows()]
			if part.block.Last {
				part.block.Others = make([]kvtier.Key, n)
			}
			b := &block{
				first: part.block.Position - part.block.First, rows: part.block.Rows(), layout: t.windowLayout(part), part: &part,
			}
			of, bytes = append(of, b), bytes+b.layout.FileBytes
		}
		blocks = append(blocks, of)
	}
	return blocks, bytes
}

// held is the memory that the copies take.
func (p *promptEnd) held() (bytes int) {
	if p != nil {
		for _, of := range p.blocks {
			for _, b := range of {
				bytes += len(b.file)
			}
		}
	}
	return bytes
}

// planPromptEnd adds the blocks of the windows that end before the prompt's last token, when the content, of so many rows, has
// ended: which blocks of the chain they hang on is known by then. The caller holds the Host's lock.
func (l *lineage) planPromptEnd(t *Tier, rows int) {
	p := l.promptEnd
	if !l.finished || p == nil {
		return
	}
	l.promptEnd = nil
	if p.end >= rows { // shorter than the prompt: less of it is exact, or can be told from others
		return
	}
	for _, of := range p.blocks {
		var keys []kvtier.Key
		for _, b := range of {
			w := &b.part.block
			w.On, w.Tokens = l.on(t, rows)(b.first/kvtier.BlockTokens), l.tokens[4*w.Position:4*(w.Position+b.rows):4*(w.Position+b.rows)]
			if w.Last {
				w.Others = keys
			}
			b.tokens, b.key, b.parent = w.Tokens, w.Key(), w.On
			keys = append(keys, b.key)
			l.blocks = append(l.blocks, b)
		}
	}
}
