package anthropic

import "github.com/ollama/ollama/api"

// CachedUsage is what Usage and DeltaUsage say of the tokens of a prompt that were found. In this API they are not among the
// input tokens: whoever wants the length of a prompt adds the two. Nothing is said to be written to a cache; what is stored
// for later has been computed, and is counted as that.
type CachedUsage struct {
	CacheReadInputTokens *int `json:"cache_read_input_tokens,omitempty"`
}

// takeCached returns the tokens that were found, and takes them off the prompt's count.
func takeCached(m *api.Metrics) CachedUsage {
	cached, ok := m.Cached()
	if !ok {
		return CachedUsage{}
	}
	m.PromptEvalCount -= cached
	return CachedUsage{&cached}
}
