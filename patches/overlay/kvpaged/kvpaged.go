// Package kvpaged reads the settings of paged attention: K/V of layers that a GPU computes, in pinned system memory.
package kvpaged

import (
	"cmp"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"
)

const gib = 1 << 30

// On says whether K/V may be paged. It is off unless the environment says otherwise, in the one way that
// libggml-cuda-tiering.so understands, too.
func On() bool { return os.Getenv("OLLAMA_PAGED_ATTN") == "1" }

// HotLayers is the number of layers whose K/V stay in the memory of their device, where a person has fixed it.
func HotLayers() (int, bool) {
	s := value("OLLAMA_PAGED_HOT_LAYERS")
	if s == "" {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		slog.Warn("invalid environment variable, the layers are chosen", "key", "OLLAMA_PAGED_HOT_LAYERS", "value", s)
		return 0, false
	}
	return n, true
}

// Mirrors says whether the first cells of paged K/V may lie on their device as well. OLLAMA_PAGED_MIRROR=0 says no; another
// number says of how many cells at most, which libggml-cuda-tiering.so sees to.
func Mirrors() bool { return value("OLLAMA_PAGED_MIRROR") != "0" }

// Budget is how much memory may be pinned, in bytes, and where that number comes from.
type Budget struct {
	Bytes uint64
	Why   string
}

// HostBudget is what OLLAMA_PAGED_HOST_GB says, in GiB. Otherwise half of the memory, and no more than is available; of
// that the tiering, where it is on, keeps the budget of its RAM tier, whose files may fill a tmpfs later.
func HostBudget(total, available uint64) Budget {
	if s := value("OLLAMA_PAGED_HOST_GB"); s != "" {
		if n, ok := gigabytes(s); ok {
			return Budget{n, "OLLAMA_PAGED_HOST_GB=" + s}
		}
		slog.Warn("invalid environment variable, using default", "key", "OLLAMA_PAGED_HOST_GB", "value", s)
	}
	b := Budget{total / 2, "half of the memory"}
	if available < b.Bytes {
		b = Budget{available, "what is available"}
	}
	if on, err := strconv.ParseBool(value("OLLAMA_KV_TIERING")); on || err != nil && value("OLLAMA_KV_TIERING") != "" {
		b.Bytes -= min(b.Bytes, ramTier(total))
		b.Why += " without the RAM tier's"
	}
	return b
}

// ramTier is the budget of the sidecar's RAM tier, by the sidecar's own default where the environment says nothing.
func ramTier(total uint64) uint64 {
	if n, ok := gigabytes(value("OLLAMA_KV_TIER_RAM_GB")); ok {
		return n
	}
	return min(total/4, 8*gib)
}

func gigabytes(s string) (uint64, bool) {
	n, err := strconv.ParseFloat(s, 64)
	if err != nil || !(n >= 0 && n < 1<<30) {
		return 0, false
	}
	return uint64(n * gib), true
}

// Refusal is the error of a model whose K/V need more than may be pinned.
func (b Budget) Refusal(needed uint64, cells int) error {
	return fmt.Errorf("K/V of %d cells need %.1f GiB of pinned system memory beside the GPUs, and %.1f GiB may be pinned (%s): "+
		"raise OLLAMA_PAGED_HOST_GB, or use a smaller num_ctx or OLLAMA_KV_CACHE_TYPE=q8_0",
		cells, float64(needed)/gib, float64(b.Bytes)/gib, b.Why)
}

// Order returns the layers in the order in which their K/V leave their devices: the largest first; of equal ones each
// beginning of the order is spread over the model, so that the layers that stay give the next copy time, and the first
// layer, before which there is none, goes last. sizes are bytes by layer; those with none are left out.
func Order(sizes []uint64) []int {
	var layers []int
	for i, size := range sizes {
		if size > 0 {
			layers = append(layers, i)
		}
	}
	slices.SortFunc(layers, func(a, b int) int {
		return cmp.Or(cmp.Compare(sizes[b], sizes[a]), cmp.Compare(bits.Reverse(uint(b)), bits.Reverse(uint(a))))
	})
	return layers
}

// HalfMask returns a mask of 0 and -Inf as f16, as GGML has it in memory.
func HalfMask(mask []float32) []byte {
	half := make([]byte, 2*len(mask))
	for i, value := range mask {
		if value != 0 {
			half[2*i+1] = 0xfc // of a little-endian 0xfc00, -Inf
		}
	}
	return half
}

func value(key string) string { return strings.Trim(strings.TrimSpace(os.Getenv(key)), "\"'") }
