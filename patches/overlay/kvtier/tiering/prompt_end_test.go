package tiering

import (
	"bytes"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier/rows"
)

// withPromptEnd returns the tiering of a model with two windows, whose first slot has a prompt of 301 tokens in cells from 500 on,
// the last of them being computed.
func withPromptEnd(t *testing.T) (*Tiering, *slot) {
	t.Helper()
	tier, _ := withWindows(t)
	tier.config.MinTokens = 1
	for _, w := range tier.model.Windows {
		var cells []int32
		for position := range 301 {
			cells = append(cells, int32(500+position))
		}
		w.Rows.Occupy(0, 0, cells)
		fillWindow(w, cells, 7)
	}
	ts := &tier.slots[0]
	ts.load(0, 0, 301)
	return tier, ts
}

// launch is what a runner does before a batch after which the first slot will hold so many rows.
func (t *Tiering) launch(held int) {
	t.host.Lock()
	defer t.host.Unlock()
	t.BeforeLaunch(0, held)
}

// fillWindow has every byte of some cells be n.
func fillWindow(w Window, cells []int32, n byte) {
	for segment := range 2 {
		w.Rows.Write(segment, cells, rows.Chunk{Data: bytes.Repeat([]byte{n}, fakeRowBytes*len(cells))})
	}
}

// windowBlocks plans what is to be stored of a content, and counts the blocks of windows.
func windowBlocks(tier *Tiering, l *lineage) (n int) {
	l.plan(tier)
	for _, b := range l.blocks {
		if b.part != nil {
			n++
		}
	}
	return n
}

func TestAPromptsEndIsCopiedWhenTheNextBatchBeginsAndStoredAsItWasThen(t *testing.T) {
	tier, ts := withPromptEnd(t)
	tier.launch(256)
	if ts.lineage.promptEnd != nil {
		t.Fatal("noted before the prompt's last batch")
	}
	tier.launch(301)
	p := ts.lineage.promptEnd
	if p == nil || p.copied || tier.held() != p.bytes || p.bytes == 0 {
		t.Fatalf("noted %+v, %d bytes are held", p, tier.held())
	}
	for _, w := range tier.model.Windows {
		fillWindow(w, w.Rows.Cells(0, 0, 300), 8) // by the prompt's last batch
	}
	tier.launch(302)
	for _, w := range tier.model.Windows {
		fillWindow(w, w.Rows.Cells(0, 0, 300), 9) // by the answer
	}
	tier.launch(303)
	if !p.copied || ts.lineage.promptEnd != p || tier.held() != p.bytes {
		t.Fatalf("%+v, %d bytes are held", p, tier.held())
	}
	for child, blocks := range p.blocks {
		n := 0
		for _, b := range blocks {
			n += b.rows
			for _, s := range b.layout.Segments {
				if got := b.payload[s.Offset : s.Offset+s.Bytes]; !bytes.Equal(got, bytes.Repeat([]byte{8}, len(got))) {
					t.Fatalf("window %d, block at %d: %v", child, b.first, got[:4])
				}
			}
		}
		if n != windowSize {
			t.Errorf("window %d has %d rows", child, n)
		}
	}
	ts.note(Text(tokensFrom(0, 310)), nil)
	ts.lineage.finished = true
	if got := windowBlocks(tier, ts.lineage); got != len(slices.Concat(p.blocks...)) || tier.held() != p.bytes {
		t.Errorf("%d blocks are to be stored, %d bytes are held", got, tier.held())
	}
}

func TestAPromptsEndThatWasNotCopiedIsNotStored(t *testing.T) {
	tier, ts := withPromptEnd(t)
	tier.launch(301)
	ts.note(Text(tokensFrom(0, 310)), nil)
	ts.lineage.finished = true
	if got := windowBlocks(tier, ts.lineage); got != 0 || tier.held() != 0 {
		t.Errorf("%d blocks are to be stored, %d bytes are held", got, tier.held())
	}
}

func TestAPromptsEndIsNotNotedWithoutMemoryForIt(t *testing.T) {
	tier, ts := withPromptEnd(t)
	other := newLineage(0)
	other.blocks = []*block{{copied: true, payload: make([]byte, catchUpBytes-1000)}}
	ts.older = append(ts.older, other)
	tier.launch(301)
	if ts.lineage.promptEnd != nil {
		t.Error("noted")
	}
	ts.older = nil
	tier.memory.available = func() int { return 1000 }
	tier.launch(301)
	if ts.lineage.promptEnd != nil {
		t.Error("noted although the machine has none")
	}
}

// eachBlockApart has every block copied in a hold of the lock of its own.
func eachBlockApart(t *testing.T) {
	t.Helper()
	most := holdBytes
	holdBytes = 1
	t.Cleanup(func() { holdBytes = most })
}

// inCells is a window of a row in the cell of the prompt's last but one token.
func inCells(tier *Tiering) *fetch {
	f := &fetch{}
	for i := range tier.model.Windows {
		part := windowPart{window: &tier.model.Windows[i]}
		part.block.Cells = []int32{500 + 299}
		f.windows = append(f.windows, &fetchedWindow{windowPart: part})
	}
	return f
}

func TestBetweenThePiecesOfAPromptsEndOthersHaveTheLock(t *testing.T) {
	eachBlockApart(t)
	tier, ts := withPromptEnd(t)
	tier.launch(301)
	p, host, times := ts.lineage.promptEnd, tier.fakeHost(), 0
	tier.host.Lock()
	host.letGo = func() {
		times++
		if !host.TryLock() {
			t.Fatal("somebody holds the lock")
		}
		if f := inCells(tier); tier.placeWindows(f, 0) {
			t.Error("a window may have a cell that is still to be copied")
		}
		host.Mutex.Unlock()
	}
	tier.BeforeLaunch(0, 302)
	host.letGo = nil
	tier.host.Unlock()
	if want := len(slices.Concat(p.blocks...)); times != want || want != 8 || !p.copied {
		t.Errorf("let go of %d times for %d blocks, copied: %v", times, want, p.copied)
	}
}

func TestAPromptsEndWhoseRowsMayHaveChangedBetweenItsPiecesIsDroppedAltogether(t *testing.T) {
	eachBlockApart(t)
	for name, change := range map[string]func(tier *Tiering){
		"a batch":         func(tier *Tiering) { tier.Launched(0, 302, 1) },
		"a restore":       func(tier *Tiering) { tier.putWindows(&fetch{}, 1) },
		"a shift":         func(tier *Tiering) { tier.BeforeShift(1, nil, 0) },
		"another content": func(tier *Tiering) { tier.slots[0].lineage = newLineage(0) },
		"its end": func(tier *Tiering) {
			tier.Finished(0, Text(tokensFrom(0, 310)), 0)
			tier.slots[0].lineage.plan(tier)
		},
		"tiering that has failed": func(*Tiering) { active.Store(nil) },
	} {
		for _, gap := range []int{0, 1, 7} {
			tier, _ := withPromptEnd(t)
			tier.slots = append(tier.slots, newSlot(1))
			ts := &tier.slots[0]
			tier.launch(301)
			p, host, gaps := ts.lineage.promptEnd, tier.fakeHost(), 0
			tier.host.Lock()
			host.letGo = func() {
				if gaps++; gaps == gap+1 {
					host.Lock()
					defer host.Mutex.Unlock()
					for _, w := range tier.model.Windows {
						fillWindow(w, []int32{500 + 150, 500 + 299}, 9)
					}
					change(tier)
				}
			}
			tier.BeforeLaunch(0, 302)
			host.letGo = nil
			tier.host.Unlock()
			if p.copied || ts.lineage.promptEnd != nil || gaps != gap+1 {
				t.Errorf("%s in gap %d of %d: copied %v, kept %v", name, gap, gaps, p.copied, ts.lineage.promptEnd != nil)
			}
			for _, l := range append(ts.older, ts.lineage) {
				l.tokens, l.finished, l.closed = make([]byte, 4*310), true, false
				if l.windowsAt = 310; windowBlocks(tier, l) != 0 {
					t.Errorf("%s in gap %d: something is stored", name, gap)
				}
			}
		}
	}
}

// Its caller has more to do under the lock.
func TestTheEndOfAPromptWithAnAnswerOfOneTokenIsCopiedInOneHoldOfTheLock(t *testing.T) {
	eachBlockApart(t)
	tier, ts := withPromptEnd(t)
	tier.launch(301)
	p := ts.lineage.promptEnd
	tier.host.Lock()
	tier.fakeHost().letGo = func() { t.Error("somebody else may have the lock") }
	tier.Finished(0, Text(tokensFrom(0, 301)), 0)
	tier.fakeHost().letGo = nil
	tier.host.Unlock()
	if !p.copied {
		t.Error("not copied")
	}
}

func TestNoWindowIsPutIntoCellsOfAPromptsEndThatAreStillToBeCopied(t *testing.T) {
	tier, _ := withPromptEnd(t)
	tier.launch(301)
	for _, w := range tier.model.Windows {
		w.Rows.Drop(0, 0) // stock has freed them
	}
	f := inCells(tier)
	if tier.placeWindows(f, 0) {
		t.Error("a window may have a cell that is still to be copied")
	}
	tier.launch(302)
	if !tier.placeWindows(f, 0) {
		t.Error("a window may not have a cell that has been copied")
	}
}
