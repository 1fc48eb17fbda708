package ollamarunner

import (
	"testing"
	"time"
)

func TestTierBatchWaitsForTheLastOneThatWasLaunched(t *testing.T) {
	launched := make(chan struct{}, 1) // the answer of a batch that is still being computed
	ready := make(chan struct{}, 1)
	none := batchState{inputsReadyCh: launched} // no batch was built after it: the only sequence is computed again
	built := batchState{ctx: tierFakeContext{}, inputsReadyCh: launched}

	if tierInputsReady(none, ready) != ready {
		t.Error("without tiering the runner does not do what stock does")
	}
	newTierFake(t, 1, t.TempDir()+"/none.sock")
	if tierInputsReady(none, ready) != launched {
		t.Error("tokens are read before the batch that gives the newest of them has been computed")
	}
	if tierInputsReady(built, ready) != ready {
		t.Error("a batch that follows another waits for the one before that")
	}
	if tierInputsReady(batchState{}, ready) != ready {
		t.Error("the first batch waits for one that never was")
	}
}

func TestTierBatchesPendingCellsAreThoseNotYetComputed(t *testing.T) {
	var b tierBatches
	b.init()
	b.built(1, []int32{4, 5})
	if rows := b.begin(1); rows != 2 {
		t.Errorf("a batch of 2 rows computes %d", rows)
	}
	b.built(2, []int32{6})
	if rows := b.rows(); rows != 3 {
		t.Errorf("%d rows are ahead", rows)
	}
	if got := b.pending(); len(got) != 3 {
		t.Errorf("pending %v", got)
	}
	b.end(1)
	if _, ok := b.pending()[6]; !ok || len(b.pending()) != 1 {
		t.Errorf("pending %v", b.pending())
	}
	b.waitNoneRunning() // batch 2 is built only: returns at once
	start := time.Now()
	b.awaitBuilt(30 * time.Millisecond)
	if took := time.Since(start); took < 30*time.Millisecond || took > time.Second {
		t.Errorf("waited %v for a batch that never ends", took)
	}
	b.begin(2)
	go func() { time.Sleep(10 * time.Millisecond); b.end(2) }()
	b.wait([]int{2})
	b.awaitBuilt(time.Hour) // nothing is built: returns at once
	b.built(3, []int32{1})
	go func() {
		time.Sleep(10 * time.Millisecond)
		b.built(4, []int32{2}) // built while waiting: not waited for
		b.end(3)
	}()
	b.awaitBuilt(time.Hour)
}

func TestTierQuiesceWaitsForTheBatchesAndThenForTheDevices(t *testing.T) {
	h := newTierHost(&Server{})
	waited := 0
	h.sync = func() {
		waited++
		if running := h.Running(); len(running) > 0 {
			t.Errorf("waits for what the devices have been given while batches %v go on giving", running)
		}
	}
	for _, wait := range []func(){h.Quiesce, h.BeforeRestore} {
		h.batches.built(1, []int32{4})
		h.batches.begin(1)
		go func() { time.Sleep(10 * time.Millisecond); h.batches.end(1) }()
		before := waited
		if wait(); waited != before+1 {
			t.Errorf("waited %d times for the devices", waited-before)
		}
	}
}
