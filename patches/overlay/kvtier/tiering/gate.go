package tiering

import (
	"time"

	"github.com/ollama/ollama/kvtier"
)

const (
	// rateTokens is the least number of recomputed tokens whose time says something about the speed of prefill.
	rateTokens = 32

	// fullBatch is how many say all about it: small batches leave a device idle.
	fullBatch = 512

	// leastTime is the shortest that says something about a speed: less is a clock's own step.
	leastTime = time.Microsecond

	// lookupShare of the time that computing the tokens would take may be spent on asking for them, at most
	// lookupMost: on a machine whose cores are all busy the sidecar may need longer than usual to answer.
	lookupShare = 0.05
	lookupMost  = time.Second

	// coreFlops is more than a CPU core does per second in a prefill, weightBytes no more than a weight takes in a
	// model file on average: what they say of a prefill's speed, until one was measured, is rather too fast.
	coreFlops   = 1e11
	weightBytes = 2

	// defaultCopyRate (bytes/s) is what the sidecar takes for the speed of checksum and copy until a restore measured it.
	defaultCopyRate = 2e9
)

// speeds are those that the sidecar's gate compares: of prefill, in tokens a second, and of what a restore does beyond having the
// files, in bytes a second. 0: not measured yet, or there is no gate.
func (s *stats) speeds() (prefill, copying float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate == kvtier.GateRestore {
		return 0, 0
	}
	return s.prefillRate, s.copyRate
}

// gated counts a restore that the gate has refused.
func (s *stats) gated() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.SkippedByGate++
	// What is never tried is never measured again: drift back to the default.
	if s.copyRate > 0 {
		s.copyRate += max(defaultCopyRate-s.copyRate, 0) / 16
	}
}

// lookupTimeout is how long a look-up of so many tokens may take.
func (s *stats) lookupTimeout(tokens int) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	rate := s.prefillRate
	if rate == 0 {
		// The first request after a load: other cores may be as busy as ever, and much is at stake if the prompt is long.
		rate = s.prefillMost
	}
	if rate == 0 {
		return kvtier.LookupTimeout
	}
	share := seconds(lookupShare * float64(tokens) / rate)
	return min(max(share, kvtier.LookupTimeout), lookupMost)
}

// getTimeout is how long the files of so many tokens may take that the tier expects to take so long: not much longer than
// that, nor than computing the tokens.
func (s *stats) getTimeout(tokens int, tierSeconds float64) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	timeout := min(getLeast+seconds(getShare*tierSeconds), getMost)
	if s.prefillRate == 0 {
		return timeout
	}
	return min(timeout, max(seconds(float64(tokens)/s.prefillRate), getLeast))
}

// prefillMost is a rate that a prefill on the CPU does not reach: two operations per token and weight.
func prefillMost(modelBytes int64, cores int) float64 {
	return float64(cores) * coreFlops / (2 * float64(max(modelBytes, 1)) / weightBytes)
}
