package tier

import (
	"bytes"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier/rows"
)

// withPromptEnd returns the tiering of a model with two windows, whose first slot has a prompt of 301 tokens in cells from 500 on,
// the last of them being computed.
func withPromptEnd(t *testing.T) (*Tier, *slot) {
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

// fillWindow has every byte of some cells be n.
func fillWindow(w Window, cells []int32, n byte) {
	for segment := range 2 {
		w.Rows.Write(segment, cells, rows.Chunk{Data: bytes.Repeat([]byte{n}, fakeRowBytes*len(cells))})
	}
}

// windowBlocks plans what is to be stored of a content, and counts the blocks of windows.
func windowBlocks(tier *Tier, l *lineage) (n int) {
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
	tier.BeforeLaunch(0, 256)
	if ts.lineage.promptEnd != nil {
		t.Fatal("noted before the prompt's last batch")
	}
	tier.BeforeLaunch(0, 301)
	p := ts.lineage.promptEnd
	if p == nil || p.copied || tier.held() != p.bytes || p.bytes == 0 {
		t.Fatalf("noted %+v, %d bytes are held", p, tier.held())
	}
	for _, w := range tier.model.Windows {
		fillWindow(w, w.Rows.Cells(0, 0, 300), 8) // by the prompt's last batch
	}
	tier.BeforeLaunch(0, 302)
	for _, w := range tier.model.Windows {
		fillWindow(w, w.Rows.Cells(0, 0, 300), 9) // by the answer
	}
	tier.BeforeLaunch(0, 303)
	if !p.copied || ts.lineage.promptEnd != p || tier.held() != p.bytes {
		t.Fatalf("%+v, %d bytes are held", p, tier.held())
	}
	for child, blocks := range p.blocks {
		n := 0
		for _, b := range blocks {
			n += b.rows
			for _, s := range b.layout.Segments {
				if got := b.file[s.Offset : s.Offset+s.Bytes]; !bytes.Equal(got, bytes.Repeat([]byte{8}, len(got))) {
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
	tier.BeforeLaunch(0, 301)
	ts.note(Text(tokensFrom(0, 310)), nil)
	ts.lineage.finished = true
	if got := windowBlocks(tier, ts.lineage); got != 0 || tier.held() != 0 {
		t.Errorf("%d blocks are to be stored, %d bytes are held", got, tier.held())
	}
}

func TestAPromptsEndIsNotNotedWithoutMemoryForIt(t *testing.T) {
	tier, ts := withPromptEnd(t)
	other := newLineage(0)
	other.blocks = []*block{{copied: true, file: make([]byte, catchUpBytes-1000)}}
	ts.older = append(ts.older, other)
	tier.BeforeLaunch(0, 301)
	if ts.lineage.promptEnd != nil {
		t.Error("noted")
	}
}

func TestNoWindowIsPutIntoCellsOfAPromptsEndThatAreStillToBeCopied(t *testing.T) {
	tier, ts := withPromptEnd(t)
	tier.BeforeLaunch(0, 301)
	for _, w := range tier.model.Windows {
		w.Rows.Drop(0, 0) // stock has freed them
	}
	f := &fetch{}
	for i := range tier.model.Windows {
		part := windowPart{window: &tier.model.Windows[i]}
		part.block.Cells = []int32{500 + 299}
		f.windows = append(f.windows, &fetchedWindow{windowPart: part})
	}
	if tier.placeWindows(f, 0) {
		t.Error("a window may have a cell that is still to be copied")
	}
	ts.keepPromptEnd(tier)
	if !tier.placeWindows(f, 0) {
		t.Error("a window may not have a cell that has been copied")
	}
}
