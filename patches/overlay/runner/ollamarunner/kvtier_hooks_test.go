package ollamarunner

import (
	"slices"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier/tiering"
)

// Package tier has the tests of what is stored and restored; here is what the hooks make of the Go engine's requests, with
// a real cache and a real sidecar.

func TestTierWhatASequenceLeavesIsRestoredInAnotherSlot(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	prompt := tierInputs(0, 64+10+1)
	f.fill(0, prompt[:64+10], 3)
	f.finish(0)
	f.batches.built(7, []int32{100, 101}) // free, and will be written
	if got := f.ask(t, 1, prompt); got != 64+10 {
		t.Fatalf("resumes at %d", got)
	}
	f.holds(t, 1, 0, 64+10, 3)
	cells := f.rows.Cells(1, 0, 64+10)
	if !slices.Contains(cells, 99) || slices.Contains(cells, 100) || slices.Contains(cells, 101) {
		t.Errorf("cells %v: the lowest free ones that are not pending are wanted", cells)
	}
	if got := f.ask(t, 0, tierInputs(1, 70)); got != 0 {
		t.Errorf("another prompt resumes at %d", got)
	}
}

func TestTierARestoreWaitsForTheBatchThatIsBeingComputed(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	prompt := tierInputs(0, 65)
	f.fill(0, prompt[:64], 3)
	f.finish(0)
	computing, synced := true, 0
	f.sync = func() {
		synced++
		if computing {
			t.Error("waited for the devices before the batch had ended")
		}
	}
	f.batches.built(1, []int32{900})
	f.batches.begin(1)
	resumed := make(chan int, 1)
	go func() { resumed <- f.ask(t, 1, prompt) }()
	select {
	case got := <-resumed:
		t.Fatalf("restored %d rows beside a batch that is being computed", got)
	case <-time.After(tierLongestAwait + 100*time.Millisecond):
	}
	computing = false
	tierComputeEnd(1)
	if got := <-resumed; got != 64 || synced != 1 {
		t.Errorf("resumes at %d, waited %d times for the devices", got, synced)
	}
}

func TestTierWhatASlotLosesIsSavedBeforeOtherRowsTakeItsCells(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	prompt := tierInputs(0, 65)
	f.fill(0, prompt[:64], 3)
	cells := f.rows.Cells(0, 0, 64)
	f.Lock()
	tierFinished(&Sequence{cache: &f.server.cache.slots[0]})
	tierBeforeDiscard(&f.server.cache.slots[0], 0)
	f.write(cells, 77)
	f.Unlock()
	f.flush()
	if got := f.ask(t, 1, prompt); got != 64 {
		t.Fatalf("resumes at %d", got)
	}
	f.holds(t, 1, 0, 64, 3)
}

func TestTierAShiftIsKnownToTheStore(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	f.fill(0, tierInputs(0, 300), 3)
	f.Lock()
	tierBeforeShift(&f.server.cache.slots[0], 64)
	f.Unlock()
	// positions from 64 on now hold other tokens, turned in place
	shifted := append(tierInputs(0, 64), tierInputs(185, 300)...)
	f.server.cache.slots[0].Inputs = shifted
	f.finish(0)
	if got := f.ask(t, 1, append(shifted, tierInputs(5, 6)...)); got != 64 {
		t.Errorf("a prompt like what was shifted resumes at %d", got)
	}
	f.drop(1, 0)
	if got := f.ask(t, 1, tierInputs(0, 301)); got != 300 {
		t.Errorf("what was there before the shift resumes at %d", got)
	}
	f.holds(t, 1, 0, 300, 3)
}

func TestTierAShiftThatIsNotExactTaintsEverySlot(t *testing.T) {
	for _, exact := range []bool{true, false} {
		f := newTierFakeWithSidecar(t)
		f.exactShift = exact
		f.fill(0, tierInputs(0, 300), 3)
		f.fill(1, tierInputs(500, 600), 4)
		f.Lock()
		tierBeforeShift(&f.server.cache.slots[0], 64)
		longer := tierInputs(500, 800) // slot 1 goes on, on top of what may have been rounded anew
		cells := f.rows.Find(1, 100, 180, nil)
		f.write(cells, 104)
		f.rows.Occupy(1, 100, cells)
		f.server.cache.slots[1].Inputs = longer[:280]
		f.Unlock()
		f.finish(1)
		f.drop(1, 0)
		want := map[bool]int{true: 280, false: 100}[exact]
		if got := f.ask(t, 1, longer); got != want {
			t.Errorf("exact %v: the other slot's prompt resumes at %d, want %d", exact, got, want)
		}
		f.drop(0, 0)
		if got := f.ask(t, 0, tierInputs(0, 301)); got != 300 {
			t.Errorf("exact %v: what was there before the shift resumes at %d", exact, got)
		}
	}
}

func TestTierAForkTakesTheTaintAlong(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	f.fill(0, tierInputs(0, 128), 3)
	f.Lock()
	tierBeforeShift(&f.server.cache.slots[0], 64)
	shifted := append(tierInputs(0, 64), tierInputs(1000, 1064)...)
	f.server.cache.slots[0].Inputs = shifted
	tierBeforeFork(&f.server.cache.slots[0], &f.server.cache.slots[1], 128)
	f.server.cache.cache.CopyPrefix(0, 1, 128)
	f.server.cache.slots[1].Inputs = slices.Clone(shifted)
	f.Unlock()
	f.finish(1)
	f.drop(0, 0)
	if got := f.ask(t, 0, append(shifted, tierInputs(5, 6)...)); got != 64 {
		t.Errorf("resumes at %d: rows from 64 on are not what their tokens alone would give", got)
	}
}

func TestTierALongPromptIsStoredWhileItIsComputed(t *testing.T) {
	t.Setenv("OLLAMA_KV_TIER_PROGRESS_SECONDS", "0")
	f := newTierFakeWithSidecar(t)
	prompt := tierInputs(0, 800)
	f.fill(0, prompt[:650], 3)
	slot := &f.server.cache.slots[0]
	seq := &Sequence{cache: slot}
	f.server.seqs = []*Sequence{seq}
	for id, held := range []int{300, 600, 650} {
		slot.Inputs = prompt[:held]
		f.batches.built(id, nil)
		f.Lock()
		tierComputeBegin(f.server, id, []*Sequence{seq})
		f.Unlock()
		tierComputeEnd(id)
	}
	f.flush()
	if got := f.ask(t, 1, prompt); got != 576 { // whole blocks of the 600 that were computed before the last batch
		t.Fatalf("resumes at %d", got)
	}
	f.holds(t, 1, 0, 576, 3)
}

func TestTierNothingIsRestoredForARequestThatWantsNoCache(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	prompt := tierInputs(0, 65)
	f.fill(0, prompt[:64], 3)
	f.finish(0)
	tierPrefetch(t.Context(), f.server, &Sequence{inputs: prompt})
	slot := &f.server.cache.slots[1]
	f.Lock()
	defer f.Unlock()
	if got := tierRestore(slot, prompt, 0, false); got != 0 {
		t.Errorf("resumes at %d", got)
	}
	if got := tierRestore(slot, prompt, 0, true); got != 64 {
		t.Errorf("one that wants it resumes at %d", got)
	}
}

func TestTierInMemoryIsTheBestSlotThatIsNotInUse(t *testing.T) {
	s := &Server{cache: &InputCache{slots: []InputCacheSlot{{Inputs: tierInputs(0, 10)}, {Inputs: tierInputs(0, 30), InUse: true}}}}
	if _, got := tierInMemory(s, tierInputs(0, 100)); got != 10 {
		t.Errorf("%d rows are in memory", got)
	}
	s.cache.multiUserCache = true
	if _, got := tierInMemory(s, tierInputs(0, 100)); got != 30 {
		t.Errorf("%d rows are in memory of a slot that may be forked", got)
	}
}

func TestTierPanicInAHookTurnsTieringOffNotTheRunner(t *testing.T) {
	newTierFake(t, 1, t.TempDir()+"/none.sock")
	unknown := &InputCacheSlot{Id: 9} // any access panics
	tierBeforeDiscard(unknown, 0)
	if tiering.Active() != nil {
		t.Error("tiering is still on")
	}
	if got := tierRestore(unknown, tierInputs(0, 5), 3, true); got != 3 {
		t.Errorf("resumes at %d", got)
	}
}
