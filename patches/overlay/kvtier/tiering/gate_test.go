package tiering

import (
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
)

func TestTheGateIsToldMeasuredSpeeds(t *testing.T) {
	s := stats{gate: kvtier.GateAuto}
	if prefill, copying := s.speeds(); prefill != 0 || copying != 0 {
		t.Errorf("nothing measured yet: %v, %v", prefill, copying)
	}
	s.prefillRate, s.copyRate = 1000, 1e9
	if prefill, copying := s.speeds(); prefill != 1000 || copying != 1e9 {
		t.Errorf("measured: %v, %v", prefill, copying)
	}
	s.gate = kvtier.GateRestore
	if prefill, _ := s.speeds(); prefill != 0 {
		t.Error("the switch does not force restoring")
	}
}

func TestAfterARefusalTheSpeedDriftsBackToTheDefault(t *testing.T) {
	s := stats{copyRate: 1e9}
	s.gated()
	if s.counts.SkippedByGate != 1 || s.copyRate != 1e9+(defaultCopyRate-1e9)/16 {
		t.Errorf("%d skipped, %v bytes/s", s.counts.SkippedByGate, s.copyRate)
	}
	for _, rate := range []float64{0, 3e9} { // not measured yet, or faster
		s.copyRate = rate
		if s.gated(); s.copyRate != rate {
			t.Errorf("%v became %v", rate, s.copyRate)
		}
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
