package ollamarunner

import (
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
	"github.com/ollama/ollama/version"
)

const (
	// tierRateTokens is the least number of recomputed tokens whose time says something about the speed of prefill.
	tierRateTokens = 32

	// tierFullBatch is how many say all about it: small batches leave a device idle.
	tierFullBatch = 512

	// tierLookupShare of the time that computing the tokens would take may be spent on asking for them, at most
	// tierLookupMost: on a machine whose cores are all busy the sidecar may need longer than usual to answer.
	tierLookupShare = 0.05
	tierLookupMost  = time.Second

	// tierCoreFlops is more than a CPU core does per second in a prefill, tierWeightBytes no more than a weight takes in a
	// model file on average: what they say of a prefill's speed, until one was measured, is rather too fast.
	tierCoreFlops   = 1e11
	tierWeightBytes = 2

	// tierDefaultCopyRate (bytes/s) stands in for the speed of checksum and copy until the first restore measured it.
	tierDefaultCopyRate = 2e9
)

// tierStats counts, measures the two speeds that the gate compares, and reports to the sidecar.
type tierStats struct {
	mu     sync.Mutex
	gate   string
	counts tierpb.RunnerReport

	prefillRate float64 // tokens/s, 0 until measured
	prefillMost float64 // tokens/s that it does not exceed, 0 when nothing is known
	copyRate    float64 // bytes/s of reading, checksum and copy, beyond what the tier itself takes
}

func (s *tierStats) init(t *kvTier) {
	s.gate = t.config.Gate
	s.counts = tierpb.RunnerReport{
		Pid: int64(os.Getpid()), Engine: tierEngine(t.description),
		Model: filepath.Base(t.server.modelPath), Tiered: true, Namespace: t.namespace[:],
		StartedUnixSeconds: float64(time.Now().UnixMicro()) / 1e6,
	}
	if info, err := os.Stat(t.server.modelPath); err == nil && t.onHost {
		s.prefillMost = prefillMost(info.Size(), runtime.NumCPU())
	}
}

// tierEngine is the engine as the namespace names it.
func tierEngine(description *tierpb.Namespace) string {
	for _, f := range description.GetFields() {
		if f.Name == "engine" {
			return f.Value
		}
	}
	return ""
}

// prefillMost is a rate that a prefill on the CPU does not reach: two operations per token and weight.
func prefillMost(modelBytes int64, cores int) float64 {
	return float64(cores) * tierCoreFlops / (2 * float64(max(modelBytes, 1)) / tierWeightBytes)
}

// unsupported is the report of a runner whose model can't be tiered.
func (s *tierStats) unsupported(server *Server, reason string) *tierpb.RunnerReport {
	return &tierpb.RunnerReport{
		Pid: int64(os.Getpid()), Engine: "ollama-go/" + version.Version,
		Model: filepath.Base(server.modelPath), Reason: reason, CpuAttention: tierAttention(server),
	}
}

// restorePays is the gate: is having tokens rows from the store expected to be faster than computing them?
func (s *tierStats) restorePays(tokens int, bytes uint64, tierSeconds float64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate == kvtier.GateRestore || s.prefillRate == 0 {
		return true
	}
	rate := s.copyRate
	if rate == 0 {
		rate = tierDefaultCopyRate
	}
	restore, recompute := tierSeconds+float64(bytes)/rate, float64(tokens)/s.prefillRate
	pays := restore < recompute
	if !pays {
		s.counts.SkippedByGate++
		// What is never tried is never measured again: drift back to the default.
		s.copyRate = rate + max(tierDefaultCopyRate-rate, 0)/16
	}
	slog.Debug("kv tiering gate", "tokens", tokens, "restore_seconds", restore, "recompute_seconds", recompute, "restore", pays)
	return pays
}

// lookupTimeout is how long a look-up of so many tokens may take.
func (s *tierStats) lookupTimeout(tokens int) time.Duration {
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
	share := seconds(tierLookupShare * float64(tokens) / rate)
	return min(max(share, kvtier.LookupTimeout), tierLookupMost)
}

// getTimeout is how long the files of so many tokens may take that the tier expects to take so long: not much longer than
// that, nor than computing the tokens.
func (s *tierStats) getTimeout(tokens int, tierSeconds float64) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	timeout := min(tierGetLeast+seconds(tierGetShare*tierSeconds), tierGetTimeout)
	if s.prefillRate == 0 {
		return timeout
	}
	return min(timeout, max(seconds(float64(tokens)/s.prefillRate), tierGetLeast))
}

// request counts a request that has ended, by its answer or because the client has gone, and measures prefill. A prompt
// whose client has gone has been computed to its end all the same, and one that was never given a slot is not counted.
//
// The sums of prefill say what restored rows would have cost. So they must not be of small batches, which leave a device idle,
// nor of rows on top of a longer prefix, which cost more than those before: both would make the gain too great. And they are
// of everything that was computed meanwhile, of other requests too.
func (s *tierStats) request(ts *tierSlot, seq *Sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	recomputed := ts.prompt - ts.resumed
	s.counts.Requests++
	s.counts.PromptTokens += uint64(ts.prompt)
	s.counts.MemoryTokens += uint64(ts.memory)
	s.counts.RestoredTokens += uint64(ts.resumed - ts.memory)
	s.counts.RecomputedTokens += uint64(recomputed)
	if seconds := seq.processingDuration.Seconds(); recomputed >= tierRateTokens && seconds > 0 {
		rate := float64(recomputed) / seconds
		if s.prefillRate == 0 {
			s.prefillRate = rate
		} else if rate > s.prefillRate || recomputed >= tierFullBatch {
			s.prefillRate += (rate - s.prefillRate) / 4 // a small batch says only that prefill is not slower
		}
		s.counts.PrefillTokensPerSecond = s.prefillRate
		if recomputed >= tierFullBatch && recomputed >= ts.resumed {
			s.counts.PrefillTokens += uint64(ts.beside)
			s.counts.PrefillSeconds += seconds
		}
	}
}

// spent counts time that a request waited for its rows from the store.
func (s *tierStats) spent(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.RestoreSeconds += d.Seconds()
}

// restored records what a restore took.
func (s *tierStats) restored(f *tierFetch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.LastRestore = proto.Clone(&f.report).(*tierpb.RestoreReport)
	// The gate adds what the tier is expected to take: it must not be in here as well.
	if own := max(f.report.FetchSeconds-f.expected, 0) + f.report.CopySeconds; own > 0 {
		rate := float64(f.report.Bytes) / own
		if s.copyRate == 0 {
			s.copyRate = rate
		} else {
			s.copyRate += (rate - s.copyRate) / 4
		}
	}
}

// shortOfMemory counts tokens that were stored and are computed again because there is no memory to read them into.
func (s *tierStats) shortOfMemory(tokens int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.MemoryShortTokens += uint64(tokens)
}

func (s *tierStats) stored(blocks int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.SnapshotBlocks += uint64(blocks)
}

// report sends the counters to the sidecar. Called without Server.mu.
func (s *tierStats) report(t *kvTier) {
	s.mu.Lock()
	counts := proto.Clone(&s.counts).(*tierpb.RunnerReport)
	s.mu.Unlock()
	counts.Failures = t.client.Failures()
	counts.CpuAttention = tierAttention(t.server)
	_ = t.client.Report(counts)
}

// measureMemcpy times a plain copy of the bytes that were restored into memory that has been touched before: by one thread,
// and by as many as a restore uses. For benchmarks only.
func measureMemcpy(f *tierFetch) (one, all float64) {
	var sources [][]byte
	total := 0
	for _, b := range f.blocks {
		for i := range b.block.Header.Segments {
			sources = append(sources, b.block.Segment(i))
			total += len(sources[len(sources)-1])
		}
	}
	dst := make([]byte, total)
	offsets := make([]int, len(sources))
	at := 0
	for i, src := range sources {
		offsets[i] = at
		at += len(src)
	}
	run := func(workers int) float64 {
		start := time.Now()
		_ = tierParallel(workers, len(sources), func(i int) { copy(dst[offsets[i]:], sources[i]) })
		return time.Since(start).Seconds()
	}
	run(1) // touches dst
	return min(run(1), run(1)), min(run(tierWorkers()), run(tierWorkers()))
}
