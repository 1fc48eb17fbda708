package ollamarunner

import "testing"

func TestTierBatchWaitsForTheLastOneThatWasLaunched(t *testing.T) {
	launched := make(chan struct{}, 1) // the answer of a batch that is still being computed
	ready := make(chan struct{}, 1)
	none := batchState{inputsReadyCh: launched} // no batch was built after it: the only sequence is computed again
	built := batchState{ctx: tierFakeContext{}, inputsReadyCh: launched}

	if tierInputsReady(none, ready) != ready {
		t.Error("without tiering the runner does not do what stock does")
	}
	tierFake(t, 1)
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
