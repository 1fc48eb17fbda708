package tiering

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ollama/ollama/kvtier/tierpb"
)

const failedReason = "the tiering has failed, and is off until the model is loaded again: Ollama's log says where"

// stats counts, measures the two speeds that the gate compares, and reports to the sidecar.
type stats struct {
	reporting sync.Mutex // of two reports the later one says more

	mu     sync.Mutex
	gate   string
	counts tierpb.RunnerReport

	prefillRate float64 // tokens/s, 0 until measured
	prefillMost float64 // tokens/s that it does not exceed, 0 when nothing is known
	copyRate    float64 // bytes/s of reading, checksum and copy, beyond what the tier itself takes
}

func (s *stats) init(t *Tiering) {
	s.gate = t.config.Gate
	s.counts = tierpb.RunnerReport{
		Pid: int64(os.Getpid()), Engine: t.model.Engine,
		Model: filepath.Base(t.model.Path), Tiered: true, Namespace: t.namespace[:],
		StartedUnixSeconds: float64(time.Now().UnixMicro()) / 1e6,
		Caches:             t.model.caches(), MinTokens: uint32(t.config.MinTokens), CacheMemory: t.model.Memory,
		Settings: t.model.Settings,
	}
	if info, err := os.Stat(t.model.Path); err == nil && t.model.OnHost {
		s.prefillMost = prefillMost(info.Size(), runtime.NumCPU())
	}
}

// caches says what kinds of caches the model has, and of which type: "plain f16", "plain + sliding window (512) f16". Empty
// where its layers are not known.
func (m Model) caches() string {
	var kinds []string
	layers := slices.Clone(m.Layers)
	for _, w := range m.Windows {
		layers = append(layers, w.Layers...)
	}
	for _, l := range layers {
		kind := l.Kind
		switch kind {
		case "full":
			kind = "plain"
		case "swa":
			kind = "sliding window"
		}
		if l.Window > 0 {
			kind += fmt.Sprintf(" (%d)", l.Window)
		}
		if !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	return strings.TrimSpace(strings.Join(kinds, " + ") + " " + m.DType)
}

// unsupported is the report of a runner whose model can't be tiered.
func (s *stats) unsupported(model Model, reason string) *tierpb.RunnerReport {
	return &tierpb.RunnerReport{
		Pid: int64(os.Getpid()), Engine: model.Engine,
		Model: filepath.Base(model.Path), Reason: reason, CpuAttention: model.Attention(), Caches: model.caches(),
		CacheMemory: model.Memory, Settings: model.Settings,
	}
}

// request counts a request that has ended, by its answer or because the client has gone, and measures prefill, which took so
// long. A prompt whose client has gone has been computed to its end all the same, and one that was never given a slot is not
// counted.
//
// The sums of prefill say what restored rows would have cost. So they must not be of small batches, which leave a device idle,
// nor of rows on top of a longer prefix, which cost more than those before: both would make the gain too great. And they are
// of everything that was computed meanwhile, of other requests too.
func (s *stats) request(ts *slot, prefill time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	recomputed := ts.prompt - ts.resumed
	s.counts.Requests++
	s.counts.PromptTokens += uint64(ts.prompt)
	s.counts.MemoryTokens += uint64(ts.memory)
	s.counts.RestoredTokens += uint64(ts.resumed - ts.memory)
	s.counts.RecomputedTokens += uint64(recomputed)
	s.counts.LastRequest = &tierpb.LastRequest{
		PromptTokens: uint64(ts.prompt), MemoryTokens: uint64(ts.memory), RestoredTokens: uint64(ts.resumed - ts.memory),
		Shortfall: ts.short.reason, AtToken: uint64(ts.short.at),
	}
	if recomputed > 1 {
		s.shortOf(ts.short.reason, recomputed)
	}
	if seconds := prefill.Seconds(); recomputed >= rateTokens && prefill >= leastTime {
		rate := float64(recomputed) / seconds
		if s.prefillRate == 0 {
			s.prefillRate = rate
		} else if rate > s.prefillRate || recomputed >= fullBatch {
			s.prefillRate += (rate - s.prefillRate) / 4 // a small batch says only that prefill is not slower
		}
		s.counts.PrefillTokensPerSecond = s.prefillRate
		if recomputed >= fullBatch && recomputed >= ts.resumed {
			s.counts.PrefillTokens += uint64(max(ts.beside, recomputed))
			s.counts.PrefillSeconds += seconds
		}
	}
}

// shortOf counts a request that computed so many tokens for this reason. The caller holds mu.
func (s *stats) shortOf(reason tierpb.Shortfall, tokens int) {
	same := func(c *tierpb.ShortfallCount) bool { return c.Reason == reason }
	i := slices.IndexFunc(s.counts.Shortfalls, same)
	if i < 0 {
		i = len(s.counts.Shortfalls)
		s.counts.Shortfalls = append(s.counts.Shortfalls, &tierpb.ShortfallCount{Reason: reason})
	}
	s.counts.Shortfalls[i].Requests++
	s.counts.Shortfalls[i].Tokens += uint64(tokens)
}

// spent counts time that a request waited for its rows from the store.
func (s *stats) spent(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.RestoreSeconds += d.Seconds()
}

// restored records what a restore took.
func (s *stats) restored(f *fetch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.LastRestore = proto.Clone(&f.report).(*tierpb.RestoreReport)
	// The gate adds what the tier is expected to take: it must not be in here as well.
	own := max(f.report.FetchSeconds-f.expected, 0) + f.report.CopySeconds
	if own >= leastTime.Seconds() && f.report.Bytes > 0 {
		rate := float64(f.report.Bytes) / own
		if s.copyRate == 0 {
			s.copyRate = rate
		} else {
			s.copyRate += (rate - s.copyRate) / 4
		}
	}
}

// shortOfMemory counts tokens that were stored and are computed again because there is no memory to read them into.
func (s *stats) shortOfMemory(tokens int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.MemoryShortTokens += uint64(tokens)
}

func (s *stats) stored(blocks int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.SnapshotBlocks += uint64(blocks)
}

// report sends the counters to the sidecar. Called without the Host's lock.
func (s *stats) report(t *Tiering) {
	s.reporting.Lock()
	defer s.reporting.Unlock()
	s.mu.Lock()
	counts := proto.Clone(&s.counts).(*tierpb.RunnerReport)
	s.mu.Unlock()
	counts.ToStore = uint64(t.work.length()) // after the counts: what was counted has been queued before
	if reason := t.off.Load(); reason != nil {
		counts.Tiered, counts.Reason, counts.ToStore = false, *reason, 0
	} else if reason := t.pending(); reason != "" {
		counts.Tiered, counts.Reason = false, reason
	}
	counts.Failures = t.client.Failures()
	counts.CpuAttention = t.model.Attention()
	_ = t.client.Report(counts)
}
