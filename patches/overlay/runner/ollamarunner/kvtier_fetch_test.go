package ollamarunner

import (
	"context"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
)

func TestTierCollectGivesUpOnReadsThatHang(t *testing.T) {
	tier := &kvTier{}
	ctx, cancel := context.WithCancel(context.Background())
	opened := make(chan tierOpened, 3)
	opened <- tierOpened{i: 1, block: tierFetched{first: 64}}
	opened <- tierOpened{i: 0, err: kvtier.ErrCorrupt}
	go func() {
		for len(opened) > 0 {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	fetched, failed := tier.collect(ctx, opened, 3)
	if failed[0] != kvtier.ErrCorrupt || failed[1] != nil || failed[2] != errTierLate || fetched[1].first != 64 {
		t.Fatalf("collected %v, %v", fetched, failed)
	}
	if tier.late.Load() != 1 {
		t.Fatal("a read that hangs is not known to")
	}
	if f := tier.prefetch(context.Background(), tierInputs(0, 200)); f != nil {
		t.Fatal("fetched while a read hangs")
	}
	opened <- tierOpened{i: 2}
	for range 1000 {
		if tier.late.Load() == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("a read that came late is still thought to hang")
}

func TestTierGetTimeoutFollowsTheTierAndThePrompt(t *testing.T) {
	s := &tierStats{}
	for _, c := range []struct {
		rate, tier float64
		tokens     int
		want       time.Duration
	}{
		{0, 0, 30000, time.Second},
		{0, 2, 30000, 9 * time.Second},
		{0, 60, 30000, tierGetTimeout},
		{1000, 2, 3000, 3 * time.Second}, // computing takes no longer
		{1000, 2, 100, time.Second},
		{10, 2, 30000, 9 * time.Second},
	} {
		s.prefillRate = c.rate
		if got := s.getTimeout(c.tokens, c.tier); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
