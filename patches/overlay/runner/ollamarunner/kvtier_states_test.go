package ollamarunner

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/model/input"
)

// A model with states of recurrent layers: what a real sidecar makes of them. Those of a position have its number, plus a salt,
// in every byte.

const (
	tierFakeStateBytes = 40
	tierFakeStateChild = 2
)

// tierFakeStates are two states of each slot, and checkpoints of them.
type tierFakeStates struct {
	now   map[int][]byte // both states of a slot
	noted []tierFakeCheckpoint
}

type tierFakeCheckpoint struct {
	slot, end int
	states    []byte
}

func newTierFakeStates() *tierFakeStates {
	return &tierFakeStates{now: make(map[int][]byte), noted: make([]tierFakeCheckpoint, 8)}
}

func tierFakeState(end int, salt byte) []byte {
	return bytes.Repeat([]byte{byte(end) + salt}, 2*tierFakeStateBytes)
}

// note is what stock does at the end of some batches.
func (s *tierFakeStates) note(slot, end int, salt byte) {
	for i := range s.noted {
		if s.noted[i].end == 0 {
			s.noted[i] = tierFakeCheckpoint{slot, end, tierFakeState(end, salt)}
			return
		}
	}
	panic("no place for a checkpoint")
}

func (s *tierFakeStates) Layers(child int) (layers []kvcache.KVTierLayer) {
	for layer := range 2 {
		layers = append(layers, kvcache.KVTierLayer{
			Child: child, Layer: layer, Kind: "state", KRowBytes: tierFakeStateBytes / 2, VRowBytes: tierFakeStateBytes / 2,
		})
	}
	return layers
}

func (s *tierFakeStates) Places() int { return len(s.noted) }

func (s *tierFakeStates) ComputedBy() string { return "hh" }

func (s *tierFakeStates) OnHost() bool { return true }

func (s *tierFakeStates) Checkpoints(slot int) (ends []int) {
	for _, c := range s.noted {
		if c.slot == slot && c.end > 0 {
			ends = append(ends, c.end)
		}
	}
	slices.Sort(ends)
	return ends
}

func (s *tierFakeStates) Cells(slot, from, to int) []int32 {
	i := slices.IndexFunc(s.noted, func(c tierFakeCheckpoint) bool { return c.slot == slot && c.end == to && to == from+1 })
	if i < 0 {
		return nil
	}
	return []int32{int32(i)}
}

func (s *tierFakeStates) Read(segment int, cells []int32, dst []byte) {
	copy(dst, s.noted[cells[0]].states[segment*tierFakeStateBytes/2:])
}

func (s *tierFakeStates) Write(segment int, cells []int32, chunk rows.Chunk) {
	c := &s.noted[cells[0]]
	if c.states == nil {
		c.states = make([]byte, 2*tierFakeStateBytes)
	}
	copy(c.states[segment*tierFakeStateBytes/2:], chunk.Data)
}

func (s *tierFakeStates) Occupy(slot, from int, cells []int32) {
	c := &s.noted[cells[0]]
	c.slot, c.end = slot, from+1
	s.now[slot] = slices.Clone(c.states)
}

func (s *tierFakeStates) Drop(slot, _ int) {
	delete(s.now, slot)
	for i := range s.noted {
		if s.noted[i].slot == slot {
			s.noted[i] = tierFakeCheckpoint{}
		}
	}
}

func (s *tierFakeStates) Free(_ int, cells []int32, avoid map[int32]struct{}) bool {
	return len(avoid) == 0 && len(cells) == 1
}

// tierFakeOfStates is the rig, after a content of `tokens` tokens in slot 0 with checkpoints at ends.
func tierFakeOfStates(t *testing.T, inputs []*input.Input, ends ...int) (tierFake, *tierFakeStates) {
	t.Helper()
	states := newTierFakeStates()
	states.note(0, 64, 0) // of what the rig itself stores
	f := newTierFakeWithSidecarOf(t, tierFakeCtx, tierStates(states, tierFakeStateChild))
	states.Drop(0, 0)
	states.Drop(1, 0)
	f.tierHost.states = tierFakeStateChild
	f.fill(0, inputs, 3)
	for _, end := range ends {
		states.note(0, end, 3)
	}
	return f, states
}

// goesOnFrom fails unless the slot has the states of a position, and its rows up to there.
func (s *tierFakeStates) goesOnFrom(t *testing.T, f tierFake, slot, end int) {
	t.Helper()
	f.holds(t, slot, 0, end, 3)
	if !bytes.Equal(s.now[slot], tierFakeState(end, 3)) {
		t.Errorf("states %v are not those of position %d", s.now[slot], end)
	}
	if s.Cells(slot, end-1, end) == nil {
		t.Errorf("position %d is no checkpoint of the slot: the next one would be elsewhere", end)
	}
}

func TestTierStatesComeBackAtCheckpoints(t *testing.T) {
	content := tierInputs(0, 300)
	for name, c := range map[string]struct {
		prompt []*input.Input
		resume int
	}{
		"goes on":                           {tierInputs(0, 320), 228},
		"the same":                          {content, 228},
		"ends behind the last checkpoint":   {tierInputs(0, 229), 228},
		"ends at the last checkpoint":       {tierInputs(0, 228), 100}, // its last token is computed
		"ends before it":                    {tierInputs(0, 200), 100},
		"differs before it":                 {append(tierInputs(0, 227), tierInputs(900, 990)...), 100},
		"differs in the checkpoint's block": {append(tierInputs(0, 101), tierInputs(900, 990)...), 100},
		"differs before all":                {append(tierInputs(0, 99), tierInputs(900, 990)...), 0},
		"ends before all":                   {tierInputs(0, 100), 0},
	} {
		t.Run(name, func(t *testing.T) {
			f, states := tierFakeOfStates(t, content, 100, 228)
			f.finish(0)
			f.drop(0, 0)
			states.Drop(0, 0)
			if got := f.ask(t, 1, c.prompt); got != c.resume {
				t.Fatalf("resumes at %d, want %d", got, c.resume)
			}
			if c.resume > 0 {
				states.goesOnFrom(t, f, 1, c.resume)
			} else if states.now[1] != nil || f.rows.Cells(1, 0, 1) != nil {
				t.Error("something was restored")
			}
		})
	}
}

func TestTierNothingIsStoredBehindTheLastCheckpoint(t *testing.T) {
	f, states := tierFakeOfStates(t, tierInputs(0, 300), 100)
	f.finish(0)
	f.drop(0, 0)
	states.Drop(0, 0)
	// Computed again from the checkpoint on, with other bits: these are stored, and come back.
	if got := f.ask(t, 0, tierInputs(0, 400)); got != 100 {
		t.Fatalf("resumes at %d", got)
	}
	f.rows.Drop(0, 0)
	f.fill(0, tierInputs(0, 400), 3)
	cells := f.rows.Cells(0, 100, 400)
	f.writeBytes(cells, bytes.Repeat([]byte{77}, len(cells)*tierFakeRowBytes))
	states.note(0, 356, 3)
	f.finish(0)
	f.drop(0, 0)
	states.Drop(0, 0)
	if got := f.ask(t, 1, tierInputs(0, 420)); got != 356 {
		t.Fatalf("resumes at %d", got)
	}
	f.holds(t, 1, 0, 64, 3)
	back := make([]byte, 256*tierFakeRowBytes)
	f.rows.Read(0, f.rows.Cells(1, 100, 356), back)
	if !bytes.Equal(back, bytes.Repeat([]byte{77}, len(back))) {
		t.Error("rows of the first computation came back beside states of the second")
	}
}

func TestTierAContentWithoutCheckpointsIsNotStored(t *testing.T) {
	f, _ := tierFakeOfStates(t, tierInputs(0, 300))
	f.finish(0)
	f.drop(0, 0)
	if got := f.ask(t, 1, tierInputs(0, 320)); got != 0 {
		t.Errorf("resumes at %d", got)
	}
}

func TestTierAnEarlierCheckpointComesBackAfterTheContentHasGrown(t *testing.T) {
	f, states := tierFakeOfStates(t, tierInputs(0, 300), 100, 228)
	f.finish(0)
	f.drop(0, 228) // the next turn: stock goes on from its checkpoint
	f.rows.Drop(0, 0)
	f.fill(0, tierInputs(0, 400), 3)
	states.note(0, 356, 3)
	f.finish(0)
	f.drop(0, 0)
	states.Drop(0, 0)
	for prompt, want := range map[int]int{420: 356, 300: 228, 228: 100} {
		if got := f.ask(t, 1, tierInputs(0, prompt)); got != want {
			t.Errorf("prompt of %d: resumes at %d, want %d", prompt, got, want)
			continue
		}
		states.goesOnFrom(t, f, 1, want)
		f.rows.Drop(1, 0)
		states.Drop(1, 0)
	}
}

func TestTierStatesBehindWhatIsExactAreNotStored(t *testing.T) {
	f, states := tierFakeOfStates(t, tierInputs(0, 300), 100, 228)
	f.Lock()
	f.tier.Doubt(0, 150)
	f.Unlock()
	f.finish(0)
	f.drop(0, 0)
	states.Drop(0, 0)
	if got := f.ask(t, 1, tierInputs(0, 320)); got != 100 {
		t.Fatalf("resumes at %d", got)
	}
	states.goesOnFrom(t, f, 1, 100)
}

// A runner that is killed in the middle of a prompt.
func TestTierStatesOfWholeBlocksAreStoredBeforeTheContentEnds(t *testing.T) {
	for checkpoint, want := range map[int]int{128: 128, 192: 192, 200: 128} {
		f, states := tierFakeOfStates(t, tierInputs(0, 300), 128, checkpoint)
		f.Lock()
		f.tier.Progress(0, tiering.Text(tierTokens(tierInputs(0, 256))), nil)
		f.Unlock()
		f.flush()
		if got := f.ask(t, 1, tierInputs(0, 320)); got != want {
			t.Fatalf("checkpoint at %d: resumes at %d, want %d", checkpoint, got, want)
		}
		states.goesOnFrom(t, f, 1, want)
	}
}

func TestTierStatesAreSavedBeforeTheirSlotGoesOn(t *testing.T) {
	f, states := tierFakeOfStates(t, tierInputs(0, 300), 228)
	f.Lock()
	tierFinished(&Sequence{cache: &f.server.cache.slots[0]})
	tierBeforeDiscard(&f.server.cache.slots[0], 0)
	states.Drop(0, 0)
	f.rows.Drop(0, 0)
	f.Unlock()
	f.flush()
	if got := f.ask(t, 1, tierInputs(0, 301)); got != 228 {
		t.Fatalf("resumes at %d", got)
	}
	states.goesOnFrom(t, f, 1, 228)
}

func TestTierStatesThatABatchWillStillChangeAreNotRestored(t *testing.T) {
	f, states := tierFakeOfStates(t, tierInputs(0, 300), 228)
	f.finish(0)
	f.drop(0, 0)
	states.Drop(0, 0)
	f.batches.builtWindow(7, tierFakeStateChild, []int32{0})
	if got := f.ask(t, 1, tierInputs(0, 320)); got != 0 {
		t.Errorf("resumes at %d", got)
	}
	if f.rows.Cells(1, 0, 1) != nil || states.now[1] != nil {
		t.Error("something was restored")
	}
	f.batches.end(7)
	if got := f.ask(t, 1, tierInputs(0, 320)); got != 228 {
		t.Errorf("afterwards: resumes at %d", got)
	}
}

// Stock has gone back to a checkpoint, and a batch of the sequence before is still to be computed.
func TestTierARequestThatHasWaitedIsNotComputedFromChangedStates(t *testing.T) {
	for name, late := range map[string]bool{"late": true, "in time": false} {
		f, states := tierFakeOfStates(t, tierInputs(0, 300), 228)
		f.finish(0)
		slot := &f.server.cache.slots[0]
		f.Lock()
		if late {
			f.batches.builtWindow(7, tierFakeStateChild, []int32{0})
		}
		tierBeforeDiscard(slot, 228)
		f.batches.end(7) // whether it has ended by now says nothing
		f.rows.Drop(0, 228)
		got := tierRestore(slot, tierInputs(0, 520), 228, false)
		f.Unlock()
		gone := f.rows.Cells(0, 0, 1) == nil && states.Checkpoints(0) == nil
		if want := map[bool]int32{true: 0, false: 228}[late]; got != want || gone != late {
			t.Errorf("%s: resumes at %d, want %d; all is gone: %v", name, got, want, gone)
		}
	}
}

func TestTierARequestWaitsForABatchThatHasBegun(t *testing.T) {
	f, states := tierFakeOfStates(t, tierInputs(0, 300), 228)
	f.finish(0)
	slot := &f.server.cache.slots[0]
	f.batches.builtWindow(7, tierFakeStateChild, []int32{0})
	f.batches.begin(7)
	ended := make(chan time.Time, 1)
	time.AfterFunc(20*time.Millisecond, func() { ended <- time.Now(); f.batches.end(7) })
	f.Lock()
	defer f.Unlock()
	tierBeforeDiscard(slot, 228)
	if at := time.Now(); len(ended) == 0 || at.Before(<-ended) {
		t.Error("it did not wait")
	}
	f.rows.Drop(0, 228)
	if got := tierRestore(slot, tierInputs(0, 520), 228, false); got != 228 || states.Checkpoints(0) == nil {
		t.Errorf("resumes at %d: what is in memory was thrown away", got)
	}
}

func TestTierWhatThatRequestThrowsAwayIsStoredAsItWas(t *testing.T) {
	f, states := tierFakeOfStates(t, tierInputs(0, 300), 228)
	slot := &f.server.cache.slots[0]
	f.Lock()
	tierFinished(&Sequence{cache: slot})
	f.batches.builtWindow(7, tierFakeStateChild, []int32{0})
	tierBeforeDiscard(slot, 228)
	tierRestore(slot, tierInputs(0, 520), 228, false)
	f.batches.end(7)
	f.fill(0, tierInputs(0, 300), 9) // computed again, with other bits
	f.Unlock()
	f.flush()
	f.rows.Drop(0, 0)
	if got := f.ask(t, 1, tierInputs(0, 320)); got != 228 {
		t.Fatalf("resumes at %d", got)
	}
	states.goesOnFrom(t, f, 1, 228)
}

func TestTierStatesAreInTheNamespaceAndNoWindow(t *testing.T) {
	w := tierStates(newTierFakeStates(), 3)
	if got := tierWindowsExtra([]tiering.Window{w}); got != "" {
		t.Errorf("windows %q", got)
	}
	if w.Child != 3 || w.Size != 1 || w.DType != "f32" || len(w.Layers) != 2 || w.Layers[0].Child != 3 {
		t.Errorf("%+v", w)
	}
}
