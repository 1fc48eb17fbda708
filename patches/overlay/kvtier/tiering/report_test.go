package tiering

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

func TestAReportTellsHowMuchIsStillToBeStored(t *testing.T) {
	tier, store := withSidecar(t, 2, 64, tierpb.Tier_TIER_RAM)
	finish := func(slot int) {
		tier.fillCells(slot, 64, 0)
		tier.host.Lock()
		defer tier.host.Unlock()
		tier.Restore(slot, nil, 0, 64)
		tier.Finished(slot, Text(tokensFrom(1000*(slot+1), 1000*(slot+1)+64)), time.Second)
	}
	finish(0)
	tier.fakeHost().begin(7) // computes what is in slot 1
	finish(1)
	go tier.snapshotLoop()
	r := store.reported(t, "the first is stored", func(r *tierpb.RunnerReport) bool { return true })
	if r.Requests != 2 || r.ToStore != 1 || r.Caches != "plain f16" || r.MinTokens != 1 {
		t.Errorf("reported %v", r)
	}
	if n := tier.work.length(); n != 1 {
		t.Errorf("%d are to be stored", n)
	}
	tier.work.add(tier.slots[1].lineage) // what is at work may be queued again: it is still one
	if n := tier.work.length(); n != 1 {
		t.Errorf("%d are to be stored", n)
	}
	tier.fakeHost().end(7)
	store.reported(t, "all is stored", func(r *tierpb.RunnerReport) bool { return r.Requests == 2 && r.ToStore == 0 })
	store.mu.Lock()
	defer store.mu.Unlock()
	if len(store.put) != 2 {
		t.Errorf("%d blocks are stored, and none is said to be missing", len(store.put))
	}
}

func TestAReportSaysWhereKVLieWhetherTheModelIsTieredOrNot(t *testing.T) {
	memory := &tierpb.CacheMemory{DeviceLayers: 1, PinnedLayers: 7, PinnedBytes: 7 << 20}
	model := Model{Attention: func() string { return "" }, Memory: memory}
	var s stats
	s.init(&Tiering{model: model})
	for _, r := range []*tierpb.RunnerReport{&s.counts, s.unsupported(model, "a reason")} {
		if !proto.Equal(r.CacheMemory, memory) {
			t.Errorf("reported %v", r)
		}
	}
}

func TestCachesAreNamedEachKindOnce(t *testing.T) {
	window := func(n int) kvtier.Layer { return kvtier.Layer{Kind: "swa", Window: n} }
	plain, chunks := kvtier.Layer{Kind: "full"}, kvtier.Layer{Kind: "chunked", Window: 8192}
	for want, m := range map[string]Model{
		"":          {},
		"plain f16": {DType: "f16", Layers: []kvtier.Layer{plain, plain}},
		"sliding window (512) + plain + sliding window (64) q8_0": {
			DType: "q8_0", Layers: []kvtier.Layer{window(512), plain, window(64), window(512)},
		},
		"chunked (8192) + plain f16": {DType: "f16", Layers: []kvtier.Layer{chunks, plain}},
	} {
		if got := m.caches(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestASidecarThatComesBackIsToldWhatIsToBeStoredAgain(t *testing.T) {
	tier, store := withSidecar(t, 3, 64, tierpb.Tier_TIER_RAM)
	tier.attached = make(chan struct{})
	close(tier.attached)
	tier.onSidecarUp()
	if r := store.reported(t, "at once", func(*tierpb.RunnerReport) bool { return true }); r.ToStore != 3 || !r.Tiered {
		t.Errorf("reported %v", r)
	}
}

func TestATieringThatHasFailedSaysSo(t *testing.T) {
	tier, store := withSidecar(t, 2, 64, tierpb.Tier_TIER_RAM)
	tier.attached = make(chan struct{})
	close(tier.attached)
	func() {
		defer Guard("a hook")
		panic("a bug")
	}()
	said := func(r *tierpb.RunnerReport) bool { return !r.Tiered && r.Reason == failedReason && r.ToStore == 0 }
	store.reported(t, "it has failed", said)
	tier.onSidecarUp()
	store.mu.Lock()
	defer store.mu.Unlock()
	if len(store.reports) != 2 || !said(store.reports[1]) {
		t.Errorf("reported %v", store.reports)
	}
}

func TestAModelThatIsNotWhatWasExpectedOfItIsNotTieredAnyMoreAndSaysWhy(t *testing.T) {
	tier, store := withSidecar(t, 1, 64, tierpb.Tier_TIER_RAM)
	tier.fillCells(0, 100, 3)
	tier.host.Lock()
	tier.Finished(0, Text(tokensFrom(500, 600)), 0)
	tier.host.Unlock()
	tier.Withdraw("a reason")
	tier.Withdraw("another")
	if Active() != nil {
		t.Error("it is active")
	}
	store.reported(t, "why", func(r *tierpb.RunnerReport) bool { return !r.Tiered && r.Reason == "a reason" && r.ToStore == 0 })
	if err := tier.snapshot(tier.work.take()); err != nil {
		t.Fatal(err)
	}
	tier.stats.mu.Lock()
	defer tier.stats.mu.Unlock()
	if n := tier.stats.counts.SnapshotBlocks; n != 0 {
		t.Errorf("%d blocks were stored", n)
	}
	store.mu.Lock()
	defer store.mu.Unlock()
	for _, r := range store.reports {
		if r.Reason == "another" {
			t.Error("it was withdrawn twice")
		}
	}
}
