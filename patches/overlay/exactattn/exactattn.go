// Package exactattn is the exact attention on the CPU as the rest of Ollama knows it: whether it was asked for, and what tells its
// results from those of ggml's own. ggml-cpu/exactattn.cpp computes it. It imports no package of Ollama and knows no tiering.
package exactattn

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
)

// Version counts the changes of the kernels that change the bits of their results, and with them the K/V of every layer but the
// first.
const Version = 2

// Exact begins what the CPU backend says of its attention when the exact kernels compute it.
const Exact = "exact"

const variable = "OLLAMA_CPU_ATTENTION"

// Asked reports whether attention on the CPU shall be computed by the exact kernels instead of ggml's own. It reads the
// environment once, as the kernels do (ggml-cpu/exactattn.cpp).
var Asked = sync.OnceValue(asked)

func asked() bool {
	switch s := strings.Trim(strings.TrimSpace(os.Getenv(variable)), "\"'"); s {
	case "", "stock":
		return false
	case Exact:
		return true
	default:
		slog.Warn("invalid environment variable, using default", "key", variable, "value", s, "default", "stock")
		return false
	}
}

// Identity is a name and a value for what the bits of K/V depend on where exact attention is asked for: its version, and its
// instruction set as the CPU backend says it in state ("exact (avx512)"). Both are "" where it is not asked for, and where no
// layer is on the CPU (state is ""). Where it can't compute the model ("stock (flash attention is off)") products with one
// column are summed as those with several nevertheless (exactattn_fewest_columns), and stock's are not.
func Identity(state string, asked bool) (name, value string) {
	switch {
	case !asked || state == "":
		return "", ""
	case !strings.HasPrefix(state, Exact):
		return "columns", "1"
	}
	_, isa, _ := strings.Cut(state, "(")
	isa, _, _ = strings.Cut(isa, ")")
	return "attention", fmt.Sprintf("%s.%d.%s", Exact, Version, isa)
}
