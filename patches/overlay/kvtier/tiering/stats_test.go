package tiering

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// What llama-server's engine is counted by is in Python; both give the numbers of the golden vectors.
func TestSumsAndSpeedsAreThoseOfTheGoldenVectors(t *testing.T) {
	var v struct {
		Cases []struct {
			Name   string
			Events []struct {
				Request *struct {
					PromptTokens    int     `json:"prompt_tokens"`
					MemoryTokens    int     `json:"memory_tokens"`
					RestoredTokens  int     `json:"restored_tokens"`
					Reason          int32   `json:"reason"`
					BesideTokens    int     `json:"beside_tokens"`
					RestoredBytes   uint64  `json:"restored_bytes"`
					PrefillSeconds  float64 `json:"prefill_seconds"`
					FetchSeconds    float64 `json:"fetch_seconds"`
					CopySeconds     float64 `json:"copy_seconds"`
					ExpectedSeconds float64 `json:"expected_ms"`
				}
				Then struct {
					PrefillRate    float64 `json:"prefill_rate"`
					CopyRate       float64 `json:"copy_rate"`
					Requests       uint64
					Prompt         uint64
					Memory         uint64
					Restored       uint64
					Recomputed     uint64
					PrefillTokens  uint64  `json:"prefill_tokens"`
					PrefillSeconds float64 `json:"prefill_seconds"`
					Skipped        uint64
					Reasons        [][3]uint64
				}
			}
		}
	}
	dir := os.Getenv("KVTIER_VECTORS")
	if dir == "" {
		t.Skip("KVTIER_VECTORS does not name the directory of the golden vectors")
	}
	data, err := os.ReadFile(filepath.Join(dir, "accounts.json"))
	if err == nil {
		err = json.Unmarshal(data, &v)
	}
	if err != nil || len(v.Cases) < 5 {
		t.Fatalf("%d cases, %v", len(v.Cases), err)
	}
	for _, c := range v.Cases {
		s := stats{gate: kvtier.GateAuto}
		for i, e := range c.Events {
			if r := e.Request; r == nil {
				s.gated()
			} else {
				if r.RestoredTokens > 0 {
					f := &fetch{expected: r.ExpectedSeconds / 1000}
					f.report.Bytes, f.report.FetchSeconds, f.report.CopySeconds = r.RestoredBytes, r.FetchSeconds, r.CopySeconds
					s.restored(f)
				}
				ts := &slot{
					prompt: r.PromptTokens, memory: r.MemoryTokens, resumed: r.MemoryTokens + r.RestoredTokens, beside: r.BesideTokens,
					short: shortfall{reason: tierpb.Shortfall(r.Reason)},
				}
				s.request(ts, time.Duration(math.Round(r.PrefillSeconds*1e9)))
			}
			want, got := e.Then, &s.counts
			prefill, copying := s.speeds()
			for name, pair := range map[string][2]float64{
				"speed of prefill": {prefill, want.PrefillRate}, "speed of copying": {copying, want.CopyRate},
				"seconds of prefill": {got.PrefillSeconds, want.PrefillSeconds},
			} {
				if math.Abs(pair[0]-pair[1]) > 1e-9*pair[1] {
					t.Errorf("%s, %d: %s is %v, want %v", c.Name, i, name, pair[0], pair[1])
				}
			}
			for name, pair := range map[string][2]uint64{
				"requests": {got.Requests, want.Requests}, "prompt": {got.PromptTokens, want.Prompt}, "memory": {got.MemoryTokens, want.Memory},
				"restored": {got.RestoredTokens, want.Restored}, "recomputed": {got.RecomputedTokens, want.Recomputed},
				"prefill": {got.PrefillTokens, want.PrefillTokens}, "skipped": {got.SkippedByGate, want.Skipped},
				"reasons": {uint64(len(got.Shortfalls)), uint64(len(want.Reasons))},
			} {
				if pair[0] != pair[1] {
					t.Fatalf("%s, %d: %s is %d, want %d", c.Name, i, name, pair[0], pair[1])
				}
			}
			for j, reason := range want.Reasons {
				if is := got.Shortfalls[j]; [3]uint64{uint64(is.Reason), is.Requests, is.Tokens} != reason {
					t.Errorf("%s, %d: %v, want %v", c.Name, i, is, reason)
				}
			}
		}
	}
}
