package tiering

import (
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// answered does what a runner does for one request: the slot's first rows are in memory or restored, the others are computed
// in batches beside those of another request, and the first token comes after so many seconds.
func answered(tier *Tiering, memory, resumed, prompt, batch, besides int, took time.Duration) {
	tier.fakeHost().ahead = 2 * 3 // built for others before the request came
	tier.Restore(0, nil, memory, prompt)
	if resumed > memory {
		tier.slots[0].load(memory, resumed, prompt)
	}
	at := resumed
	for at < prompt+2 { // two tokens of the answer, which are no prefill
		rows := 1
		if at < prompt {
			rows = min(batch, prompt-at)
		}
		at += rows
		tier.Launched(0, at, rows+besides)
	}
	tier.Finished(0, Text(tokensFrom(0, at)), took)
}

func TestThreeCountsAddUpAndOnlyLongPrefillIsMeasured(t *testing.T) {
	for _, c := range []struct {
		name                             string
		memory, resumed, prompt, besides int
		measured                         int // tokens
	}{
		{name: "from the start", prompt: 700, measured: 700},
		{name: "beside another request, whose rows take their time too", prompt: 700, besides: 50, measured: 700 + 2*50},
		{name: "after a short prefix", memory: 20, resumed: 80, prompt: 700, measured: 620},
		{name: "the step after a hit", resumed: 699, prompt: 700},
		{name: "a short prompt", prompt: 511},
		{name: "on top of more than it computes", memory: 600, resumed: 640, prompt: 1240},
	} {
		t.Run(c.name, func(t *testing.T) {
			tier := fake(t, 1)
			tier.config.Snapshot = false
			answered(tier, c.memory, c.resumed, c.prompt, 512, c.besides, 2*time.Second)
			n := &tier.stats.counts
			if n.Requests != 1 || n.PromptTokens != uint64(c.prompt) || n.MemoryTokens != uint64(c.memory) ||
				n.RestoredTokens != uint64(c.resumed-c.memory) || n.RecomputedTokens != uint64(c.prompt-c.resumed) {
				t.Errorf("counted %+v", n)
			}
			want := 0.0
			if c.measured > 0 {
				want = 2
				c.measured += 2 * 3 // what was under way when it came
			}
			if n.PrefillTokens != uint64(c.measured) || n.PrefillSeconds != want {
				t.Errorf("measured %d tokens in %v s, want %d in %v", n.PrefillTokens, n.PrefillSeconds, c.measured, want)
			}
		})
	}
}

func TestTimeOfARestoreCountsAlsoWhenNothingComesOfItAndWaitingForADeviceNever(t *testing.T) {
	tier, _ := withSidecar(t, 1, 2*64, tierpb.Tier_TIER_RAM)
	prompt := tokensFrom(0, 200)
	counts := func() (spent, copying float64) {
		tier.stats.mu.Lock()
		defer tier.stats.mu.Unlock()
		if last := tier.stats.counts.LastRestore; last != nil {
			copying = last.CopySeconds
		}
		return tier.stats.counts.RestoreSeconds, copying
	}
	if tier.prefetchFor(t.Context(), prompt) == nil {
		t.Fatal("nothing fetched")
	}
	fetched, _ := counts()
	if fetched <= 0 || fetched > 60 {
		t.Fatalf("the fetch took %v s", fetched)
	}
	const computes = 2 * time.Second
	waited := 0
	tier.fakeHost().restores = func() { waited++; time.Sleep(computes) }
	tier.config.MinTokens = 1000 // not worth it any more
	if got := tier.restoreFor(0, prompt, 0); got != 0 || waited == 0 {
		t.Fatalf("resumes at %d, waited %d times", got, waited)
	}
	nothing, _ := counts()
	if nothing -= fetched; nothing <= 0 || nothing >= computes.Seconds()/2 {
		t.Errorf("the restore that came to nothing took %v s", nothing)
	}
	tier.config.MinTokens = 1
	if tier.prefetchFor(t.Context(), prompt) == nil {
		t.Fatal("nothing fetched again")
	}
	before, _ := counts()
	if got := tier.restoreFor(0, prompt, 0); got != 128 {
		t.Fatalf("resumes at %d", got)
	}
	spent, copying := counts()
	if spent -= before; spent <= 0 || spent >= computes.Seconds()/2 || copying <= 0 || copying >= computes.Seconds()/2 {
		t.Errorf("the restore took %v s, %v of them copying", spent, copying)
	}
}
