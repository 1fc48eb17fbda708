package envconfig

import "os"

func init() { numCtx() }

// numCtx lets OLLAMA_NUM_CTX be another name of OLLAMA_CONTEXT_LENGTH, which counts if both are set.
func numCtx() {
	if n := Var("OLLAMA_NUM_CTX"); n != "" && Var("OLLAMA_CONTEXT_LENGTH") == "" {
		os.Setenv("OLLAMA_CONTEXT_LENGTH", n)
	}
}
