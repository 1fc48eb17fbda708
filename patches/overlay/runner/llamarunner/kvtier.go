package llamarunner

import "github.com/ollama/ollama/kvtier"

// tierUnsupported says that models of this runner are not tiered.
func tierUnsupported(modelPath string) {
	kvtier.ReportUnsupported(modelPath, "model runs on the llama.cpp runner, not supported yet; OLLAMA_NEW_ENGINE=1 may move it")
}
