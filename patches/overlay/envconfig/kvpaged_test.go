package envconfig

import "testing"

func TestNumCtxIsAnotherNameOfContextLength(t *testing.T) {
	for _, test := range []struct {
		numCtx, contextLength string
		want                  uint
	}{
		{"", "", 0},
		{"65536", "", 65536},
		{"", "8192", 8192},
		{"65536", "8192", 8192},
	} {
		t.Setenv("OLLAMA_NUM_CTX", test.numCtx)
		t.Setenv("OLLAMA_CONTEXT_LENGTH", test.contextLength)
		numCtx()
		if got := ContextLength(); got != test.want {
			t.Errorf("OLLAMA_NUM_CTX=%q OLLAMA_CONTEXT_LENGTH=%q: %d, not %d", test.numCtx, test.contextLength, got, test.want)
		}
	}
}
