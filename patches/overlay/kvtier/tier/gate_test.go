package tier

import (
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
)

func TestGateComparesMeasuredSpeeds(t *testing.T) {
	s := stats{gate: kvtier.GateAuto}
	if !s.restorePays(1000, 1e9, 10) {
		t.Error("nothing measured yet: restore")
	}
	s.prefillRate, s.copyRate = 1000, 1e9
	if s.restorePays(1000, 5e8, 0.6) { // 1.1 s against 1 s
		t.Error("restoring is slower, yet it is chosen")
	}
	if !s.restorePays(1000, 1e8, 0.6) { // 0.7 s against 1 s
		t.Error("restoring is faster, yet it is not chosen")
	}
	if s.counts.SkippedByGate != 1 {
		t.Errorf("%d skipped", s.counts.SkippedByGate)
	}
	s.gate = kvtier.GateRestore
	if !s.restorePays(1, 1e12, 100) {
		t.Error("the switch does not force restoring")
	}
}

func TestLookupMayTakeLongerWhenRecomputingTakesVeryLong(t *testing.T) {
	s := stats{}
	if got := s.lookupTimeout(30000); got != kvtier.LookupTimeout {
		t.Errorf("nothing measured: %v", got)
	}
	s.prefillMost = prefillMost(1<<30, 2)
	if got := s.lookupTimeout(30000); got != lookupMost {
		t.Errorf("30,000 tokens of a model of 1 GiB on 2 cores: %v", got)
	}
	if got := s.lookupTimeout(100); got != kvtier.LookupTimeout {
		t.Errorf("100 tokens of it: %v", got)
	}
	s.prefillRate = 100
	for tokens, want := range map[int]time.Duration{100: kvtier.LookupTimeout, 1000: 500 * time.Millisecond, 30000: lookupMost} {
		if got := s.lookupTimeout(tokens); got != want {
			t.Errorf("%d tokens at 100/s: %v, want %v", tokens, got, want)
		}
	}
}

func TestGetTimeoutFollowsTheTierAndThePrompt(t *testing.T) {
	s := &stats{}
	for _, c := range []struct {
		rate, tier float64
		tokens     int
		want       time.Duration
	}{
		{0, 0, 30000, time.Second},
		{0, 2, 30000, 9 * time.Second},
		{0, 60, 30000, getMost},
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
