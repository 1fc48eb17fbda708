package ollamarunner

import "github.com/ollama/ollama/api"

// tierCached counts the tokens of the prompt that need not be computed: those that were in memory, and those restored. The
// slot has just been loaded, and the caller holds the lock since.
func tierCached(seq *Sequence) api.CachedMetrics {
	return api.CountCached(seq.numPromptInputs - len(seq.inputs))
}
