package openai

import "github.com/ollama/ollama/api"

// CachedUsage is what Usage says of the tokens of a prompt that were found. They are among its prompt tokens.
type CachedUsage struct {
	PromptTokensDetails *PromptTokensDetails `json:"prompt_tokens_details,omitempty"`
}

type PromptTokensDetails struct {
	CachedTokens int `json:"cached_tokens"`
}

func cachedUsage(m api.Metrics) CachedUsage {
	cached, ok := m.Cached()
	if !ok {
		return CachedUsage{}
	}
	return CachedUsage{&PromptTokensDetails{CachedTokens: cached}}
}

// SetCached puts in how many of the input tokens were found, where stock says 0.
func (r *ResponsesResponse) SetCached(m api.Metrics) {
	if cached, ok := m.Cached(); ok && r.Usage != nil {
		r.Usage.InputTokensDetails.CachedTokens = cached
	}
}

// setCached does the same in the usage of a streamed response.
func setCached(usage map[string]any, m api.Metrics) {
	if cached, ok := m.Cached(); ok {
		usage["input_tokens_details"] = map[string]any{"cached_tokens": cached}
	}
}
