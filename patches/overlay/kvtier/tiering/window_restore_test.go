package tiering

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/madeblock"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// fakeWindowRows are fakeRows of a cache that drops rows.
type fakeWindowRows struct{ *fakeRows }

func (r fakeWindowRows) Free(slot int, cells []int32, avoid map[int32]struct{}) bool {
	for _, cell := range cells {
		_, pending := avoid[cell]
		if s := r.slot[cell]; pending || (s >= 0 && s != slot) {
			return false
		}
	}
	return true
}

const (
	windowSize   = 200
	windowTokens = 400
)

// withWindows is withSidecar for a model that has two windows, too, which end with the stored tokens. What is stored lies on
// a disk.
func withWindows(t *testing.T) (*Tiering, *sidecar) {
	t.Helper()
	tier, store := withSidecar(t, 1, windowTokens, tierpb.Tier_TIER_LOCAL)
	store.attached = make(map[kvtier.Key][]*tierpb.AttachedBlock)
	tokens := kvtier.TokenBytes(tokensFrom(0, windowTokens))
	for child := 1; child <= 2; child++ {
		layers := []kvtier.Layer{{
			Child: child, Kind: "swa", Window: windowSize, KVHeads: 2, KHeadDim: 4, VHeadDim: 4,
			KRowBytes: fakeRowBytes, VRowBytes: fakeRowBytes,
		}}
		tier.model.Windows = append(tier.model.Windows, Window{
			Child: child, Size: windowSize, Cells: fakeCells, DType: "f16", Layers: layers, Rows: fakeWindowRows{newFakeRows(2)},
		})
	}
	for i := range tier.model.Windows {
		w := &tier.model.Windows[i]
		on := func(number int) kvtier.Key { return store.blocks[number].key }
		var others []kvtier.Key
		for _, part := range windowParts(w, tokens, on) {
			for row := range part.block.Rows() {
				part.block.Cells = append(part.block.Cells, int32(900-part.block.Position-row)) // backwards
			}
			if part.block.Last {
				part.block.Others = others
			}
			others = append(others, part.block.Key())
			store.addWindow(t, tier, part)
		}
	}
	return tier, store
}

// windowByte is every byte of a position's row in a segment of a window.
func windowByte(child, position, segment int) byte {
	return storedByte(position, segment) + byte(17*child)
}

// addWindow writes a window block's file.
func (s *sidecar) addWindow(t *testing.T, tier *Tiering, part windowPart) {
	t.Helper()
	w := part.block
	key, extra := w.Key(), w.Extras()[0]
	h := &tierpb.BlockHeader{
		Namespace: tier.namespace[:], Key: key[:], Parent: w.On[:], FirstPosition: uint32(w.Position - w.First + kvtier.BlockTokens),
		Tokens: w.Tokens, Extras: []*tierpb.Extra{{Row: extra.Row, Digest: extra.Digest}},
		Segments: kvtier.SegmentsOf(part.window.Layers, part.window.DType),
	}
	for _, cell := range w.Cells {
		h.Cells = append(h.Cells, uint32(cell))
	}
	for _, other := range w.Others {
		h.Window = append(h.Window, other[:])
	}
	payload := madeblock.Payload(h, func(segment, at int) byte {
		return windowByte(w.Child, w.Position+at/int(h.Segments[segment].RowBytes), segment)
	})
	file := madeblock.File(h, payload)
	path := filepath.Join(s.dir, fmt.Sprintf("window-%d-%d", part.block.Child, part.block.Position))
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	s.blocks = append(s.blocks, sidecarBlock{key, 0, path, len(file)})
	s.attached[part.block.On] = append(s.attached[part.block.On], &tierpb.AttachedBlock{Key: key[:], ExpectedSeconds: s.seconds})
}

// windowReads does something before each window block's file is read.
func (t *Tiering) windowReads(before func(path string)) {
	read := t.files.read
	t.files.read = func(path string, size int) (*kvtier.File, error) {
		if strings.Contains(path, "window") {
			before(path)
		}
		return read(path, size)
	}
}

var windowPrompt = tokensFrom(0, windowTokens+1)

func TestWindowsComeBackInTheirCellsHoweverTheirBlocksAreRead(t *testing.T) {
	tier, _ := withWindows(t)
	var mu sync.Mutex
	reads := 0
	tier.windowReads(func(string) {
		mu.Lock()
		defer mu.Unlock()
		reads++
	})
	f := tier.prefetchFor(t.Context(), windowPrompt)
	if f == nil || f.rows != windowTokens || len(f.windows) != reads || reads != 8 {
		t.Fatalf("fetched %+v, read %d window blocks", f, reads)
	}
	if got := tier.restoreFor(0, windowPrompt, 0); got != windowTokens {
		t.Fatalf("resumes at %d", got)
	}
	holds(t, tier, 0, 0, windowTokens)
	for _, w := range tier.model.Windows {
		cells := w.Rows.Cells(0, windowTokens-windowSize, windowTokens)
		if cells == nil || cells[0] != 900-(windowTokens-windowSize) {
			t.Fatalf("the window is not in its cells: %v", cells)
		}
		for segment := range 2 {
			got := make([]byte, fakeRowBytes*len(cells))
			w.Rows.Read(segment, cells, got)
			for i := range cells {
				want := bytes.Repeat([]byte{windowByte(w.Child, windowTokens-windowSize+i, segment)}, fakeRowBytes)
				if !bytes.Equal(got[fakeRowBytes*i:fakeRowBytes*(i+1)], want) {
					t.Fatalf("window %d, segment %d, row %d is wrong", w.Child, segment, i)
				}
			}
		}
	}
}

func TestBlocksOfWindowsAreReadSeveralAtATime(t *testing.T) {
	tier, _ := withWindows(t)
	var mu sync.Mutex
	reading, most := 0, 0
	together := make(chan struct{})
	tier.windowReads(func(path string) {
		if strings.HasSuffix(path, "-384") {
			return // the last ones, which name the others
		}
		mu.Lock()
		reading++
		if most = max(most, reading); most == leastReaders {
			close(together)
			most++ // once
		}
		mu.Unlock()
		select {
		case <-together:
		case <-time.After(5 * time.Second):
		}
		mu.Lock()
		defer mu.Unlock()
		reading--
	})
	if f := tier.prefetchFor(t.Context(), windowPrompt); f == nil {
		t.Errorf("nothing fetched, %d blocks at a time", most)
	}
}

func TestAReadOfAWindowThatHangsHoldsNobodyBeyondTheDeadline(t *testing.T) {
	for _, hanging := range []string{"window-1-384", "window-2-256"} { // one that names the others, one of those
		t.Run(hanging, func(t *testing.T) {
			tier, _ := withWindows(t)
			goOn := make(chan struct{})
			tier.windowReads(func(path string) {
				if strings.HasSuffix(path, hanging) {
					<-goOn
				}
			})
			start := time.Now()
			l := tier.prefetch(context.Background(), Text(windowPrompt), len(windowPrompt), tier.held0)
			if took := time.Since(start); took > getLeast+getLeast/2 {
				t.Errorf("it took %v", took)
			}
			if l.fetch != nil || l.short.reason != filesLate {
				t.Errorf("fetched %+v, %v", l.fetch, l.short)
			}
			if again := tier.prefetch(context.Background(), Text(windowPrompt), len(windowPrompt), tier.held0); again.short.reason != readHangs {
				t.Errorf("while it hangs: %v", again.short)
			}
			close(goOn)
			for deadline := time.Now().Add(5 * time.Second); tier.late.Load() > 0; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("the read is still thought to hang")
				}
			}
			if tier.memory.held != 0 {
				t.Errorf("%d bytes are held by nobody", tier.memory.held)
			}
			if f := tier.prefetchFor(t.Context(), windowPrompt); f == nil || len(f.windows) != 8 {
				t.Errorf("fetched %+v when it hangs no more", f)
			}
		})
	}
}

func TestWindowsAndChainHaveOneDeadline(t *testing.T) {
	tier, _ := withWindows(t)
	goOn := make(chan struct{})
	defer close(goOn)
	slow := func(path string) {
		if strings.HasSuffix(path, "-384") {
			time.Sleep(getLeast * 8 / 10)
		}
	}
	tier.windowReads(slow)
	read := tier.files.read
	tier.files.read = func(path string, size int) (*kvtier.File, error) {
		if !strings.Contains(path, "window") {
			<-goOn
		}
		return read(path, size)
	}
	start := time.Now()
	l := tier.prefetch(context.Background(), Text(windowPrompt), len(windowPrompt), tier.held0)
	if took := time.Since(start); took > getLeast*14/10 {
		t.Errorf("it took %v", took)
	}
	if l.fetch != nil || l.short.reason != filesLate {
		t.Errorf("fetched %+v, %v", l.fetch, l.short)
	}
}

func TestADamagedBlockOfAWindowIsFoundAndReported(t *testing.T) {
	tier, store := withWindows(t)
	for i, b := range store.blocks {
		if strings.HasSuffix(b.path, "window-2-256") {
			content, err := os.ReadFile(b.path)
			if err != nil {
				t.Fatal(err)
			}
			content[len(content)-4096] ^= 1 // in its last segment
			if err := os.WriteFile(b.path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			defer store.wasReported(t, i)
		}
	}
	l := tier.prefetch(context.Background(), Text(windowPrompt), len(windowPrompt), tier.held0)
	if l.fetch != nil || l.short.reason != damaged {
		t.Errorf("fetched %+v, %v", l.fetch, l.short)
	}
	if tier.memory.held != 0 {
		t.Errorf("%d bytes are held by nobody", tier.memory.held)
	}
}

func TestOfWindowsTheOneThatLacksABlockIsReportedAndNoOther(t *testing.T) {
	for _, child := range []int{1, 2} {
		for _, first := range []int{200, 256, 320} {
			tier, store := withWindows(t)
			name, end := fmt.Sprintf("window-%d-%d", child, first), -1
			for i, b := range store.blocks {
				if strings.HasSuffix(b.path, fmt.Sprintf("window-%d-384", child)) {
					end = i
				}
			}
			store.blocks = slices.DeleteFunc(store.blocks, func(b sidecarBlock) bool { return filepath.Base(b.path) == name })
			end-- // it came after that one
			l := tier.prefetch(context.Background(), Text(windowPrompt), len(windowPrompt), tier.held0)
			if l.fetch != nil || l.short.reason != windowMissing {
				t.Errorf("%s: fetched %+v, %v", name, l.fetch, l.short)
			}
			store.wasReported(t, end)
			for tier.reports.Load() > 0 {
				time.Sleep(time.Millisecond)
			}
			store.mu.Lock()
			if len(store.damaged) != 1 {
				t.Errorf("%s: %d blocks were reported", name, len(store.damaged))
			}
			store.mu.Unlock()
		}
	}
}
