package kvtier

import (
	"fmt"
	"log/slog"
	"sync"
)

// CPUAttentionVersion counts the changes of the exact attention that change the bits of its results, and with them the
// K/V of every layer but the first.
const CPUAttentionVersion = 1

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

// AttentionExtra is what the exact attention adds to the description of a namespace: nothing where it is off or computes
// no layer, so that what was stored before stays valid.
func AttentionExtra(computes bool) string {
	if !computes {
		return ""
	}
	return fmt.Sprintf(";attention=exact.%d", CPUAttentionVersion)
}
