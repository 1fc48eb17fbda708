package tiering

import "slices"

// promptEnd are the windows that end before the last token of a prompt, from where the same prompt is gone on with when it comes
// again: a regenerated answer. They are in the cells from when the last batch of the prompt has been computed until the batch of the
// answer's first token is; by then stock has freed some of the cells, and may have given one to that token.
//
// They are copied when that batch has been taken up and is not launched yet, in pieces, and the runner's lock is let go of between
// them: the runner lets go of it anyway before it launches the batch. What may have the lock meanwhile is a request that gets a slot
// and the storing of others. It goes around the noted cells (placeWindows) until all are copied. Should anybody write rows all the
// same, or the slot's content end, what has been copied is dropped, all of it: half of the rows of then and half of those of
// now are the end of no prompt. Their memory is made ready before, while the prompt's last batch is computed: what the system has to
// clear takes longer than the copying.
type promptEnd struct {
	end     int
	cells   [][]int32  // of each window, by number
	blocks  [][]*block // of each window
	bytes   int
	memory  chan [][]byte // of all blocks, when there is some
	copying bool          // has begun
	copied  bool          // the blocks have their rows
}

// beforeLaunch notes the windows when the prompt's last batch is about to be launched, and copies them before the next.
func (ts *slot) beforeLaunch(t *Tiering, held int) {
	if ts.lineage.promptEnd != nil {
		ts.keepPromptEnd(t, true)
	} else if held == ts.prompt && len(t.model.Windows) > 0 {
		ts.notePromptEnd(t)
	}
}

// notePromptEnd notes where the windows lie that end before the prompt's last token, if they are wanted and not known to be stored.
func (ts *slot) notePromptEnd(t *Tiering) {
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
	if p.layOut(t); p.bytes > t.copyRoom() {
		return
	}
	p.makeReady()
	ts.lineage.promptEnd = p
}

// makeReady has memory for all blocks, every page of it there, without the lock.
func (p *promptEnd) makeReady() {
	var sizes []int
	for _, b := range slices.Concat(p.blocks...) {
		sizes = append(sizes, b.layout.Bytes)
	}
	p.memory = make(chan [][]byte, 1)
	go func(ready chan<- [][]byte) {
		var memory [][]byte
		for _, size := range sizes {
			file := make([]byte, size)
			for i := 0; i < size; i += 4096 {
				file[i] = 0
			}
			memory = append(memory, file)
		}
		ready <- memory
	}(p.memory)
}

// keepPromptEnd copies the rows that were noted. With letGo others may have the lock between two pieces.
func (ts *slot) keepPromptEnd(t *Tiering, letGo bool) {
	p := ts.lineage.promptEnd
	if p == nil || p.copying {
		return
	}
	p.copying = true
	if !t.model.OnHost {
		t.host.Quiesce()
	}
	if p.copied = ts.copyPromptEnd(t, p, letGo); !p.copied && ts.lineage.promptEnd == p {
		ts.lineage.promptEnd = nil
	}
}

// copyPromptEnd reports whether the blocks have all rows, and all of them of one time.
func (ts *slot) copyPromptEnd(t *Tiering, p *promptEnd, letGo bool) bool {
	written := t.written
	unchanged := func() bool { return t.written == written && ts.lineage.promptEnd == p && active.Load() == t }
	var memory [][]byte
	t.between(letGo, func() { memory = <-p.memory })
	blocks := slices.Concat(p.blocks...)
	for i, b := range blocks {
		b.payload = memory[i]
	}
	for at := 0; at < len(blocks); {
		if at > 0 {
			t.between(letGo, func() {})
		}
		if !unchanged() {
			return false
		}
		n, err := t.copyPiece(blocks[at:])
		if err != nil {
			return false
		}
		at += n
	}
	for _, b := range blocks {
		b.copied = true
	}
	return true
}

// between does something while others may have the lock.
func (t *Tiering) between(letGo bool, do func()) {
	if letGo {
		t.host.Unlock()
		defer t.host.Lock() // also after a panic: the runner lets go of it
	}
	do()
}

// copyPiece copies the rows of as many of the first blocks as are copied in one hold of the lock, and returns how many that are.
func (t *Tiering) copyPiece(blocks []*block) (n int, err error) {
	var segments []func()
	for bytes := 0; n < len(blocks) && (n == 0 || bytes+blocks[n].layout.Bytes <= holdBytes); n++ {
		b := blocks[n]
		bytes += b.layout.Bytes
		for i, s := range b.layout.Segments {
			segments = append(segments, func() { b.part.window.Rows.Read(i, b.part.cells, b.payload[s.Offset:s.Offset+s.Bytes]) })
		}
	}
	workers := 1
	if t.model.OnHost {
		workers = workerCount()
	}
	return n, parallel(workers, len(segments), func(i int) { segments[i]() })
}

// dropPromptEnd forgets what was noted and not copied.
func (ts *slot) dropPromptEnd() {
	if p := ts.lineage.promptEnd; p != nil && !p.copied {
		ts.lineage.promptEnd = nil
	}
}

// layOut has the blocks of each window, without what their tokens say, and how many bytes they take.
func (p *promptEnd) layOut(t *Tiering) {
	for i := range t.model.Windows {
		w, of := &t.model.Windows[i], []*block(nil)
		for _, part := range windowParts(w, make([]byte, 4*p.end), unnamed) {
			part.lieIn(p.cells[i][part.block.Position-max(0, p.end-w.Size):])
			b := t.windowBlock(part, of)
			of, p.bytes = append(of, b), p.bytes+b.layout.Bytes
		}
		p.blocks = append(p.blocks, of)
	}
}

// held is the memory that the copies take, from when it is made ready.
func (p *promptEnd) held() int {
	if p == nil {
		return 0
	}
	return p.bytes
}

// planPromptEnd adds the blocks of the windows that end before the prompt's last token, when the content, of so many rows, has
// ended: which blocks of the chain they hang on is known by then. The caller holds the Host's lock.
func (l *lineage) planPromptEnd(t *Tiering, rows int) {
	p := l.promptEnd
	if !l.finished || p == nil {
		return
	}
	l.promptEnd = nil
	if !p.copied || p.end >= rows { // shorter than the prompt: less of it is exact, or can be told from others
		return
	}
	for _, of := range p.blocks {
		for _, b := range of {
			w := &b.part.block
			w.Tokens = l.tokens[4*w.Position : 4*(w.Position+b.rows) : 4*(w.Position+b.rows)]
		}
		l.addWindow(of, rows)
	}
}
