package tier

import (
	"log/slog"
	"time"

	"github.com/ollama/ollama/kvtier"
)

const (
	// rateTokens is the least number of recomputed tokens whose time says something about the speed of prefill.
	rateTokens = 32

	// fullBatch is how many say all about it: small batches leave a device idle.
	fullBatch = 512

	// lookupShare of the time that computing the tokens would take may be spent on asking for them, at most
	// lookupMost: on a machine whose cores are all busy the sidecar may need longer than usual to answer.
	lookupShare = 0.05
	lookupMost  = time.Second

	// coreFlops is more than a CPU core does per second in a prefill, weightBytes no more than a weight takes in a
	// model file on average: what they say of a prefill's speed, until one was measured, is rather too fast.
	coreFlops   = 1e11
	weightBytes = 2

	// defaultCopyRate (bytes/s) stands in for the speed of checksum and copy until the first restore measured it.
	defaultCopyRate = 2e9
)

// restorePays is the gate: is having tokens rows from the store expected to be faster than computing them?
func (s *stats) restorePays(tokens int, bytes uint64, tierSeconds float64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate == kvtier.GateRestore || s.prefillRate == 0 {
		return true
	}
	rate := s.copyRate
	if rate == 0 {
		rate = defaultCopyRate
	}
	restore, recompute := tierSeconds+float64(bytes)/rate, float64(tokens)/s.prefillRate
	pays := restore < recompute
	if !pays {
		s.counts.SkippedByGate++
		// What is never tried is never measured again: drift back to the default.
		s.copyRate = rate + max(defaultCopyRate-rate, 0)/16
	}
	slog.Debug("kv tiering gate", "tokens", tokens, "restore_seconds", restore, "recompute_seconds", recompute, "restore", pays)
	return pays
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
