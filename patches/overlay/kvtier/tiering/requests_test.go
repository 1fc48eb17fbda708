package tiering

import (
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier/tierpb"
)

func TestAnEndedSequenceIsStoredToItsLastRow(t *testing.T) {
	tier, store := withSidecar(t, 1, 64, tierpb.Tier_TIER_RAM)
	tier.fillCells(0, 74, 0)
	tier.host.Lock()
	tier.Finished(0, Text(tokensFrom(1000, 1074)), time.Second)
	tier.host.Unlock()
	if err := tier.snapshot(tier.work.take()); err != nil {
		t.Fatal(err)
	}
	if len(store.put) != 2 {
		t.Errorf("%d blocks were stored of 64 + 10 rows", len(store.put))
	}
	if n := tier.stats.counts.Requests; n != 1 {
		t.Errorf("%d requests were counted", n)
	}
}

func TestALongPromptIsWorthASnapshotEvery512RowsThatTookLongEnough(t *testing.T) {
	launch := func(tier *Tiering, held ...int) (worth []int) {
		tier.Restore(0, nil, 0, 2000)
		for _, n := range held {
			worth = append(worth, tier.Launched(0, n, 1))
		}
		return worth
	}
	for name, c := range map[string]struct {
		change func(tier *Tiering)
		want   [5]int
	}{
		"on":                {func(*Tiering) {}, [5]int{0, 0, 600, 0, 1200}},
		"no snapshots":      {func(tier *Tiering) { tier.config.Snapshot = false }, [5]int{}},
		"on a device":       {func(tier *Tiering) { tier.model.OnHost = false }, [5]int{}},
		"not for that long": {func(tier *Tiering) { tier.config.Progress = time.Hour }, [5]int{}},
	} {
		tier := withSidecarOnly(t, 64)
		c.change(tier)
		if got := launch(tier, 500, 600, 1100, 1200, 1300); [5]int(got) != c.want {
			t.Errorf("%s: worth %v, want %v", name, got, c.want)
		}
	}
}
