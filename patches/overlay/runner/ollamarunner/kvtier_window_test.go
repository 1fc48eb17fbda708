package ollamarunner

import (
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/model/input"
)

// A model whose second half of layers sees, and keeps, the last 100 positions only: what a real sidecar makes of it.

const tierTestWindow = 100

// windowHolds fails unless the slot has exactly the rows of the window that ends at a position, with (position + salt) in every
// byte. It returns their cells.
func (f tierFake) windowHolds(t *testing.T, slot, end int, salt byte) []int32 {
	t.Helper()
	w := f.windows[0]
	from := max(0, end-w.Size)
	cells := w.Rows.Cells(slot, from, end)
	if cells == nil {
		t.Fatalf("positions %d to %d are not in the window of slot %d", from, end, slot)
	}
	if from > 0 && w.Rows.Cells(slot, from-1, from) != nil {
		t.Errorf("position %d is in the window, too", from-1)
	}
	back := make([]byte, len(cells)*tierFakeRowBytes)
	for segment := range 2 {
		w.Rows.Read(segment, cells, back)
		for i, got := range back {
			if want := byte(from+i/tierFakeRowBytes) + salt; got != want {
				t.Fatalf("segment %d, position %d: %d, want %d", segment, from+i/tierFakeRowBytes, got, want)
			}
		}
	}
	return cells
}

func TestTierAWindowComesBackWhereItsContentEndedInTheCellsItLayIn(t *testing.T) {
	for _, end := range []int{64, 74, tierTestWindow, tierTestWindow + 1, 128, 300, 320, 333} {
		f := newTierFakeWithSidecarOf(t, tierTestWindow)
		prompt := tierInputs(0, end+20)
		f.fill(0, prompt[:end], 3)
		before := f.windowHolds(t, 0, end, 3)
		f.finish(0)
		f.drop(0, 0)
		f.windows[0].Rows.Write(0, before, rows.Chunk{Data: make([]byte, len(before)*tierFakeRowBytes)}) // whoever came next
		if got := f.ask(t, 1, prompt); got != end {
			t.Fatalf("%d tokens, resumes at %d", end, got)
		}
		f.holds(t, 1, 0, end, 3)
		if after := f.windowHolds(t, 1, end, 3); !slices.Equal(after, before) {
			t.Errorf("%d tokens: cells %v, want %v", end, after, before)
		}
		if !f.server.cache.cache.CanResume(1, int32(end)) {
			t.Errorf("%d tokens: stock could not go on from there", end)
		}
	}
}

func TestTierAWindowComesBackNowhereElse(t *testing.T) {
	f := newTierFakeWithSidecarOf(t, tierTestWindow)
	prompt := tierInputs(0, 400)
	f.fill(0, prompt[:300], 3)
	f.finish(0)
	f.drop(0, 0)
	for name, other := range map[string][]int{
		"shorter":                  {0, 290},
		"the same, one token less": {0, 300}, // its last token is computed
		"ends with a block":        {0, 257},
	} {
		if got := f.ask(t, 1, tierInputs(other[0], other[1])); got != 0 {
			t.Errorf("%s: resumes at %d", name, got)
		}
	}
	if got := f.ask(t, 1, append(tierInputs(0, 280), tierInputs(900, 990)...)); got != 0 {
		t.Errorf("differs before the end: resumes at %d", got)
	}
	if got := f.windows[0].Rows.Cells(1, 0, 1); got != nil {
		t.Errorf("the slot has rows of a window that was not restored: %v", got)
	}
	if got := f.ask(t, 1, prompt); got != 300 {
		t.Errorf("goes on: resumes at %d", got)
	}
}

func TestTierAWindowWhoseCellsAreTakenIsComputed(t *testing.T) {
	for name, take := range map[string]func(f tierFake, cell int32){
		"by another slot":  func(f tierFake, cell int32) { f.windows[0].Rows.Occupy(0, 7, []int32{cell}) },
		"by a built batch": func(f tierFake, cell int32) { f.batches.builtWindow(7, f.windows[0].Child, []int32{cell}) },
	} {
		f := newTierFakeWithSidecarOf(t, tierTestWindow)
		prompt := tierInputs(0, 301)
		f.fill(0, prompt[:300], 3)
		cells := f.windowHolds(t, 0, 300, 3)
		f.finish(0)
		f.drop(0, 0)
		take(f, cells[len(cells)/2])
		if got := f.ask(t, 1, prompt); got != 0 {
			t.Errorf("%s: resumes at %d", name, got)
		}
		if f.rows.Cells(1, 0, 1) != nil || f.windows[0].Rows.Cells(1, 299, 300) != nil {
			t.Errorf("%s: something was restored", name)
		}
		f.windows[0].Rows.Drop(0, 0)
		f.batches.end(7)
		if got := f.ask(t, 1, prompt); got != 300 {
			t.Errorf("%s, free again: resumes at %d", name, got)
		}
	}
}

func TestTierAWindowIsSavedBeforeItsSlotGoesOn(t *testing.T) {
	f := newTierFakeWithSidecarOf(t, tierTestWindow)
	prompt := tierInputs(0, 301)
	f.fill(0, prompt[:300], 3)
	f.Lock()
	tierFinished(&Sequence{cache: &f.server.cache.slots[0]})
	tierBeforeDiscard(&f.server.cache.slots[0], 300) // the next turn: all of it is in memory
	f.windows[0].Rows.Drop(0, 0)                     // and moves the window
	f.Unlock()
	f.flush()
	f.drop(0, 0)
	if got := f.ask(t, 1, prompt); got != 300 {
		t.Fatalf("resumes at %d", got)
	}
	f.windowHolds(t, 1, 300, 3)
}

func TestTierAWindowTakesThePlaceOfWhatTheSlotHasOfIt(t *testing.T) {
	f := newTierFakeWithSidecarOf(t, tierTestWindow)
	prompt := tierInputs(0, 401)
	f.fill(0, prompt[:400], 3)
	f.finish(0)
	f.fill(1, prompt[:300], 3) // in memory, in other cells
	f.drop(0, 0)
	tierPrefetch(t.Context(), f.server, &Sequence{inputs: prompt})
	f.Lock()
	got := tierRestore(&f.server.cache.slots[1], prompt, 300, true)
	f.Unlock()
	if got != 400 {
		t.Fatalf("resumes at %d", got)
	}
	f.holds(t, 1, 0, 400, 3)
	f.windowHolds(t, 1, 400, 3)
}

// tierTestPrompt has slot 0 compute a prompt of 300 tokens, up to when its last batch is launched: where the rows lie then that the
// same prompt would go on from.
func tierTestPrompt(t *testing.T, f tierFake) (prompt []*input.Input, cells []int32) {
	t.Helper()
	prompt = tierInputs(0, 300)
	f.Lock()
	defer f.Unlock()
	tierRestore(&f.server.cache.slots[0], prompt, 0, false)
	f.fill(0, prompt[:299], 3)
	cells = f.windowHolds(t, 0, 299, 3)
	f.tier.BeforeLaunch(0, 200)
	f.tier.BeforeLaunch(0, 300)
	return prompt, cells
}

func TestTierAPromptThatComesAgainGoesOnBeforeItsLastToken(t *testing.T) {
	for name, goesOn := range map[string]func(f tierFake, answer []*input.Input){
		"after an answer": func(f tierFake, answer []*input.Input) {
			f.tier.BeforeLaunch(0, 301)
			f.rows.Drop(0, 0)
			f.fill(0, answer, 3)
			f.fillWindow(f.windows[0], 0, len(answer), 9) // other rows, where some of the prompt's lay
			f.tier.BeforeLaunch(0, 302)
		},
		"after a token": func(f tierFake, answer []*input.Input) {
			f.rows.Drop(0, 0)
			cells := f.rows.Find(0, 0, 300, nil)
			f.write(cells, 3)
			f.rows.Occupy(0, 0, cells)
			f.server.cache.slots[0].Inputs = answer[:300]
		},
		"after the slot has gone on": func(f tierFake, answer []*input.Input) {
			f.tier.BeforeLaunch(0, 301)
			f.rows.Drop(0, 0)
			f.fill(0, answer, 3)
			tierFinished(&Sequence{cache: &f.server.cache.slots[0]})
			tierBeforeDiscard(&f.server.cache.slots[0], 0)
			f.fillWindow(f.windows[0], 0, len(answer), 9)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newTierFakeWithSidecarOf(t, tierTestWindow)
			prompt, cells := tierTestPrompt(t, f)
			f.Lock()
			goesOn(f, tierInputs(0, 320))
			f.Unlock()
			f.finish(0)
			f.drop(0, 0)
			if got := f.ask(t, 1, prompt); got != 299 {
				t.Fatalf("resumes at %d", got)
			}
			f.holds(t, 1, 0, 299, 3)
			if got := f.windowHolds(t, 1, 299, 3); !slices.Equal(got, cells) {
				t.Errorf("cells %v, want %v", got, cells)
			}
			if got := f.ask(t, 1, tierInputs(0, 299)); got != 0 {
				t.Errorf("a shorter prompt resumes at %d", got)
			}
		})
	}
}

// Without context to go on with, stock ends a sequence while the last batch of its prompt is being computed.
func TestTierAPromptThatEndsBeforeItIsComputedIsNotKept(t *testing.T) {
	f := newTierFakeWithSidecarOf(t, tierTestWindow)
	prompt, _ := tierTestPrompt(t, f)
	f.Lock()
	f.batches.built(7, nil)
	f.batches.begin(7)
	f.rows.Drop(0, 0)
	f.fill(0, prompt, 3)
	tierFinished(&Sequence{cache: &f.server.cache.slots[0]})
	f.Unlock()
	f.batches.end(7)
	f.flush()
	f.drop(0, 0)
	if got := f.ask(t, 1, prompt); got != 0 {
		t.Errorf("resumes at %d", got)
	}
}

func TestTierARestoreLeavesTheEndOfAPromptAloneUntilItIsCopied(t *testing.T) {
	f := newTierFakeWithSidecarOf(t, tierTestWindow)
	other := tierInputs(5000, 5301)
	f.fill(0, other[:300], 3)
	f.finish(0)
	f.drop(0, 0)
	tierTestPrompt(t, f)
	f.windows[0].Rows.Drop(0, 0) // stock has freed what the answer does not see
	if got := f.ask(t, 1, other); got != 0 {
		t.Errorf("resumes at %d, in cells of which the rows are still wanted", got)
	}
	f.Lock()
	f.tier.BeforeLaunch(0, 301)
	f.Unlock()
	if got := f.ask(t, 1, other); got != 300 {
		t.Errorf("afterwards: resumes at %d", got)
	}
}

func TestTierAPromptWhoseAnswerTookItsCellsIsNotKept(t *testing.T) {
	for name, change := range map[string]func(f tierFake){
		"rows lost before the last batch": func(f tierFake) { f.windows[0].Rows.Drop(0, 250) },
		"not exact from the middle on":    func(f tierFake) { f.tier.Doubt(0, 250) },
	} {
		f := newTierFakeWithSidecarOf(t, tierTestWindow)
		prompt := tierInputs(0, 300)
		f.Lock()
		tierRestore(&f.server.cache.slots[0], prompt, 0, false)
		f.fill(0, prompt[:299], 3)
		change(f)
		f.tier.BeforeLaunch(0, 300)
		f.tier.BeforeLaunch(0, 301)
		f.rows.Drop(0, 0)
		f.fill(0, tierInputs(0, 320), 3)
		f.Unlock()
		f.finish(0)
		f.drop(0, 0)
		if got := f.ask(t, 1, prompt); got != 0 {
			t.Errorf("%s: resumes at %d", name, got)
		}
	}
}

func TestTierAWindowThatHasLostRowsIsNotStored(t *testing.T) {
	f := newTierFakeWithSidecarOf(t, tierTestWindow)
	prompt := tierInputs(0, 301)
	f.fill(0, prompt[:300], 3)
	f.windows[0].Rows.Drop(0, 299)
	f.finish(0)
	f.drop(0, 0)
	if got := f.ask(t, 1, prompt); got != 0 {
		t.Errorf("resumes at %d", got)
	}
}

func TestTierAWindowOfAnotherSizeIsAnotherNamespace(t *testing.T) {
	seen := map[string]bool{}
	for _, w := range []tiering.Window{
		{Child: 0, Size: 1024, Cells: 1536}, {Child: 1, Size: 1024, Cells: 1536}, {Child: 0, Size: 1025, Cells: 1536},
		{Child: 0, Size: 1024, Cells: 2816},
	} {
		seen[tierWindowsExtra([]tiering.Window{w})] = true
	}
	free := func(int, int, map[int32]struct{}) []int32 { return nil }
	anywhere := tierWindowsExtra([]tiering.Window{{Child: 0, Size: 1024, Cells: 1536, FreeCells: free}})
	if more := tierWindowsExtra([]tiering.Window{{Child: 0, Size: 1024, Cells: 2816, FreeCells: free}}); anywhere != more || seen[more] {
		t.Errorf("rows that may lie anywhere: %q, with more cells %q", anywhere, more)
	}
	if len(seen) != 4 || !seen[";windows=0:1024:1536"] || tierWindowsExtra(nil) != "" {
		t.Errorf("%v, without windows %q", seen, tierWindowsExtra(nil))
	}
}

func TestTierWhatIsInMemoryCountsOnlyWhereASlotCouldGoOn(t *testing.T) {
	f := newTierFakeWithSidecarOf(t, tierTestWindow)
	f.fill(0, tierInputs(0, 300), 3)
	f.server.cache.slots[0].InUse = false
	// with two slots stock keeps a row more than the window: one can also go on from before the last row
	for prompt, want := range map[int]int{400: 300, 301: 300, 300: 300, 299: 0, 250: 0} {
		if _, got := tierInMemory(f.server, tierInputs(0, prompt)); got != want {
			t.Errorf("prompt of %d tokens: %d are in memory, want %d", prompt, got, want)
		}
	}
}
