package llm

import (
	"github.com/ollama/ollama/exactattn"
	"github.com/ollama/ollama/fs/ggml"
	"github.com/ollama/ollama/ml"
)

// exactAttnFlash decides on flash attention for the Ollama engine: the exact attention runs inside of that operation,
// so that a model without a GPU gets it unless its user said no (userSet) or the model can't have it.
func exactAttnFlash(on, userSet bool, gpus []ml.DeviceInfo, model *ggml.GGML) bool {
	exact := exactattn.Asked()
	if on || userSet || !exact || len(gpus) > 0 {
		return on
	}
	return model.SupportsFlashAttention()
}
