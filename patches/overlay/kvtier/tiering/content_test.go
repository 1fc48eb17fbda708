package tiering

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// contentOf makes a stand-in say this of the model's files.
func contentOf(state tierpb.CheckFilesResponse_State, reason string) func() (*tierpb.CheckFilesResponse, error) {
	return func() (*tierpb.CheckFilesResponse, error) {
		return &tierpb.CheckFilesResponse{State: state, Reason: reason}, nil
	}
}

// unproven is a tiering whose slot 0 holds a conversation that has ended, and of whose model's file nothing is known yet.
func unproven(t *testing.T) (*Tiering, *sidecar) {
	t.Helper()
	tier, store := withSidecar(t, 1, 0, tierpb.Tier_TIER_RAM)
	tier.sound.Store(false)
	tier.fillCells(0, 128, 0)
	tier.restoreFor(0, tokensFrom(0, 128), 0)
	tier.host.Lock()
	tier.Finished(0, Text(tokensFrom(0, 128)), time.Second)
	tier.host.Unlock()
	return tier, store
}

func (s *sidecar) putCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.put)
}

func TestTheFirstConversationWaitsUntilTheFileIsChecked(t *testing.T) {
	tier, store := unproven(t)
	var known atomic.Bool
	store.content = func() (*tierpb.CheckFilesResponse, error) {
		if known.Load() {
			return contentOf(tierpb.CheckFilesResponse_STATE_SOUND, "")()
		}
		return contentOf(tierpb.CheckFilesResponse_STATE_PENDING, beingChecked)()
	}
	var asked atomic.Int32
	answer := store.content
	store.content = func() (*tierpb.CheckFilesResponse, error) { asked.Add(1); return answer() }
	go tier.snapshotLoop()
	for deadline := time.Now().Add(5 * time.Second); asked.Load() < 3 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	tier.stats.report(tier)
	store.reported(t, "not tiered yet", func(r *tierpb.RunnerReport) bool { return !r.Tiered && r.Reason == beingChecked })
	if n := store.putCount(); n > 0 {
		t.Fatalf("%d blocks are offered before the model's file is checked", n)
	}
	known.Store(true)
	tier.Drain()
	if n := store.putCount(); n != 2 {
		t.Errorf("%d blocks of the first conversation are stored, not 2", n)
	}
	if !tier.sound.Load() {
		t.Error("look-ups are not made although the file is sound")
	}
	store.reported(t, "tiered", func(r *tierpb.RunnerReport) bool { return r.Tiered })
}

func TestNothingOfADamagedFileIsStoredOrLookedUp(t *testing.T) {
	tier, store := unproven(t)
	store.content = contentOf(tierpb.CheckFilesResponse_STATE_REFUSED, "it is damaged")
	go tier.snapshotLoop()
	tier.Drain()
	if n := store.putCount(); n > 0 {
		t.Errorf("%d blocks of a damaged model are offered", n)
	}
	if Active() != nil {
		t.Error("the tiering is on for a damaged model")
	}
	store.reported(t, "refused", func(r *tierpb.RunnerReport) bool { return !r.Tiered && r.Reason == "it is damaged" })
}

func TestAFileThatChangesUnderTheRunnerEndsItsTiering(t *testing.T) {
	tier, store := unproven(t)
	tier.sound.Store(true) // it was
	store.content = contentOf(tierpb.CheckFilesResponse_STATE_REFUSED, "it was changed")
	go tier.snapshotLoop()
	tier.Drain()
	if n := store.putCount(); n > 0 || tier.sound.Load() || Active() != nil {
		t.Errorf("%d blocks are offered of a file that has changed; sound %v", n, tier.sound.Load())
	}
}

func TestASidecarThatCannotCheckFilesIsAsOneThatRefuses(t *testing.T) {
	tier, store := unproven(t)
	store.content = func() (*tierpb.CheckFilesResponse, error) {
		return nil, status.Error(codes.Unimplemented, "unknown method")
	}
	if err := tier.checkContent(contentWait); !errors.Is(err, errUnchecked) {
		t.Errorf("%v", err)
	}
	if Active() != nil || !tier.client.Up() {
		t.Error("the tiering is on beside a sidecar that is too old, or that is taken for one that is away")
	}
	store.reported(t, "which is old", func(r *tierpb.RunnerReport) bool { return !r.Tiered && r.Reason != "" })
}

func TestAModelIsUnloadedSoonAlthoughItsFileIsStillRead(t *testing.T) {
	tier, store := unproven(t)
	var ends atomic.Bool
	store.content = func() (*tierpb.CheckFilesResponse, error) {
		if ends.Load() {
			return contentOf(tierpb.CheckFilesResponse_STATE_REFUSED, "the test ends")()
		}
		return contentOf(tierpb.CheckFilesResponse_STATE_PENDING, beingChecked)()
	}
	go tier.snapshotLoop()
	start := time.Now()
	tier.Flush(t.Context())
	if took := time.Since(start); took > flushTimeout/2 {
		t.Errorf("the server waits for %v", took)
	}
	ends.Store(true) // the loop's waiting
}

func TestTheFirstRequestWaitsAMomentForTheFirstWordOfTheFile(t *testing.T) {
	tier, store := withSidecar(t, 1, 192, tierpb.Tier_TIER_RAM)
	tier.sound.Store(false)
	store.content = func() (*tierpb.CheckFilesResponse, error) {
		time.Sleep(5 * time.Millisecond)
		return contentOf(tierpb.CheckFilesResponse_STATE_SOUND, "")()
	}
	go tier.learnContent(contentWait)
	if f := tier.prefetchFor(t.Context(), tokensFrom(0, 200)); f == nil || f.rows != 192 {
		t.Error("nothing is restored for the first request after a model that is known was loaded")
	}
	tier.sound.Store(false) // and nobody ever says anything
	start := time.Now()
	for range 20 {
		if tier.known() {
			t.Fatal("known, although nobody said so")
		}
	}
	if took := time.Since(start); took > time.Second {
		t.Errorf("each request waits: %v", took)
	}
}

func TestAFileThatTakesLongToReadIsAskedAboutUntilItIsKnown(t *testing.T) {
	tier, store := unproven(t)
	var asked atomic.Int32
	store.content = func() (*tierpb.CheckFilesResponse, error) {
		switch asked.Add(1) {
		case 1:
			return contentOf(tierpb.CheckFilesResponse_STATE_PENDING, beingChecked)()
		case 2: // an answer that fails, without the sidecar being away
			return nil, status.Error(codes.ResourceExhausted, "too many questions")
		}
		return contentOf(tierpb.CheckFilesResponse_STATE_SOUND, "")()
	}
	start := time.Now()
	tier.learnContent(0) // one question, as if reading took longer than all that one waits
	if !tier.sound.Load() {
		t.Errorf("after %d questions the file is given up, although it is only read for long", asked.Load())
	}
	if took := time.Since(start); took < contentMost {
		t.Errorf("%d questions in %v", asked.Load(), took)
	}
}

func TestThereIsOneQuestionForLookUpsHoweverOftenTheSidecarComesUp(t *testing.T) {
	tier, store := unproven(t)
	store.content = contentOf(tierpb.CheckFilesResponse_STATE_PENDING, beingChecked)
	ended := make(chan struct{}, 2)
	begin := func(number int64) {
		go func() { tier.learnContent(0); ended <- struct{}{} }()
		for tier.asked.Load() < number {
			time.Sleep(time.Millisecond)
		}
	}
	begin(1)
	begin(2)
	select {
	case <-ended: // that of before
	case <-time.After(10 * time.Second):
		t.Fatal("both go on")
	}
	active.Store(nil)
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("it goes on after the tiering has ended")
	}
}
