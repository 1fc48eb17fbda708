package api

import (
	"fmt"
	"os"

	"github.com/ollama/ollama/kvtier"
)

// CachedMetrics is what Metrics say of the tokens of a prompt that were found, as later releases of Ollama name and count
// them. It is empty where nobody has counted.
type CachedMetrics struct {
	// PromptEvalCachedCount is how many of the PromptEvalCount tokens need not be computed, because their K/V was in memory
	// or was restored.
	PromptEvalCachedCount *CachedCount `json:"prompt_eval_cached_count,omitzero"`
}

// CachedCount is a number of tokens; 0 says that none was found.
type CachedCount int

// IsZero keeps the count out of all answers while the tiering is off, one that a remote model's server gave among them:
// they are stock's then.
func (c *CachedCount) IsZero() bool {
	return c == nil || !kvtier.On()
}

// CountCached is the metrics of a prompt, given how many of its tokens were found.
func CountCached(tokens int) CachedMetrics {
	count := CachedCount(tokens)
	return CachedMetrics{&count}
}

// Cached returns how many tokens of the prompt were found, never more than it has; ok is false where nobody has counted.
func (m *Metrics) Cached() (tokens int, ok bool) {
	if m.PromptEvalCachedCount == nil {
		return 0, false
	}
	return min(max(int(*m.PromptEvalCachedCount), 0), m.PromptEvalCount), true
}

// summarizeCached prints the line about the tokens that were found, and returns the metrics of what was computed: the time
// that a prompt took is that of those.
func (m *Metrics) summarizeCached() *Metrics {
	computed := *m
	if cached, _ := m.Cached(); cached > 0 {
		fmt.Fprintf(os.Stderr, "prompt eval cached:   %d token(s)\n", cached)
		computed.PromptEvalCount -= cached
	}
	return &computed
}
