package kvtier

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
)

// CPUAttentionVersion counts the changes of the exact attention that change the bits of its results, and with them the
// K/V of every layer but the first.
const CPUAttentionVersion = 2

// AttentionExact begins what the CPU backend says of its attention when the exact kernels compute it.
const AttentionExact = "exact"

// CPUAttentionExact reports whether attention on the CPU shall be computed by the exact kernels instead of ggml's own. It
// reads the environment once, as the kernels do (ggml-cpu/kvtier-attn.cpp).
var CPUAttentionExact = sync.OnceValue(cpuAttentionExact)

func cpuAttentionExact() bool {
	switch s := value("OLLAMA_CPU_ATTENTION"); s {
	case "", "stock":
		return false
	case "exact":
		return true
	default:
		slog.Warn("invalid environment variable, using default", "key", "OLLAMA_CPU_ATTENTION", "value", s, "default", "stock")
		return false
	}
}

// AttentionExtra is what exact attention adds to the description of a namespace where it is asked for: its version, and its
// instruction set as the CPU backend says it in state ("exact (avx512)"); nothing where no layer is on the CPU ("").
// Where it can't compute the model ("stock (flash attention is off)") products with one column are summed as those with
// several nevertheless (kvtier_attn_fewest_columns), and stock's are not.
func AttentionExtra(state string, asked bool) string {
	switch {
	case !asked || state == "":
		return ""
	case !strings.HasPrefix(state, AttentionExact):
		return Part("columns", "1")
	}
	_, isa, _ := strings.Cut(state, "(")
	isa, _, _ = strings.Cut(isa, ")")
	return Part("attention", fmt.Sprintf("%s.%d.%s", AttentionExact, CPUAttentionVersion, isa))
}
