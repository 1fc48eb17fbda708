package kvpaged

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestItIsOffUnlessTheVariableIsOne(t *testing.T) {
	for value, want := range map[string]bool{"": false, "0": false, "true": false, "1": true} {
		t.Setenv("OLLAMA_PAGED_ATTN", value)
		if On() != want {
			t.Errorf("OLLAMA_PAGED_ATTN=%q: on is %v", value, On())
		}
	}
}

func TestLayersWithTheLargestCacheLeaveFirst(t *testing.T) {
	if got := Order([]uint64{5, 9, 0, 5, 9}); !slices.Equal(got[:2], []int{1, 4}) && !slices.Equal(got[:2], []int{4, 1}) {
		t.Errorf("%v does not begin with layers 1 and 4", got)
	} else if len(got) != 4 || slices.Contains(got, 2) {
		t.Errorf("%v: layer 2 has no K/V", got)
	}
}

func TestEqualLayersLeaveSpreadOverTheModelAndTheFirstLast(t *testing.T) {
	sizes := slices.Repeat([]uint64{7}, 36)
	order := Order(sizes)
	if order[35] != 0 {
		t.Errorf("layer %d leaves last", order[35])
	}
	for n := 1; n <= 36; n++ {
		gone := slices.Sorted(slices.Values(order[:n]))
		longest, run := 0, 0
		for i := 1; i < n; i++ {
			if gone[i] == gone[i-1]+1 {
				run++
			} else {
				run = 0
			}
			longest = max(longest, run)
		}
		if n <= 16 && longest > 0 {
			t.Errorf("of %d layers that left two are neighbours: %v", n, gone)
		}
	}
}

func TestBudget(t *testing.T) {
	const total = 64 * gib
	for _, test := range []struct {
		name               string
		host, tiering, ram string
		available, want    uint64
		why                string
	}{
		{name: "half", available: 60 * gib, want: 32 * gib, why: "half of the memory"},
		{name: "little is left", available: 5 * gib, want: 5 * gib, why: "available"},
		{name: "beside a RAM tier", tiering: "1", available: 60 * gib, want: 24 * gib, why: "RAM tier"},
		{name: "beside a RAM tier of its own size", tiering: "1", ram: "20", available: 60 * gib, want: 12 * gib, why: "RAM tier"},
		{name: "the RAM tier needs it all", tiering: "1", ram: "50", available: 60 * gib, want: 0, why: "RAM tier"},
		{name: "tiering is off", tiering: "0", ram: "20", available: 60 * gib, want: 32 * gib, why: "half"},
		{name: "a person's own", host: "1.5", tiering: "1", available: gib, want: 3 * gib / 2, why: "OLLAMA_PAGED_HOST_GB=1.5"},
		{name: "no number", host: "lots", available: 60 * gib, want: 32 * gib, why: "half"},
		{name: "a negative one", host: "-1", available: 60 * gib, want: 32 * gib, why: "half"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("OLLAMA_PAGED_HOST_GB", test.host)
			t.Setenv("OLLAMA_KV_TIERING", test.tiering)
			t.Setenv("OLLAMA_KV_TIER_RAM_GB", test.ram)
			got := HostBudget(total, test.available)
			if got.Bytes != test.want || !strings.Contains(got.Why, test.why) {
				t.Errorf("%d bytes (%s), not %d (%s)", got.Bytes, got.Why, test.want, test.why)
			}
		})
	}
}

func TestARefusalSaysHowMuchAndWhatToDo(t *testing.T) {
	said := Budget{8 * gib, "half of the memory"}.Refusal(12*gib, 131072).Error()
	for _, part := range []string{"131072 cells", "12.0 GiB", "8.0 GiB", "half of the memory", "OLLAMA_PAGED_HOST_GB", "num_ctx"} {
		if !strings.Contains(said, part) {
			t.Errorf("%q does not say %q", said, part)
		}
	}
}

func TestHotLayers(t *testing.T) {
	for value, want := range map[string]int{"": -1, "0": 0, "12": 12, "-3": -1, "some": -1} {
		t.Setenv("OLLAMA_PAGED_HOT_LAYERS", value)
		if n, ok := HotLayers(); ok != (want >= 0) || ok && n != want {
			t.Errorf("OLLAMA_PAGED_HOT_LAYERS=%q: %d, %v", value, n, ok)
		}
	}
}

func TestAHalfMaskHasZerosAndMinusInfinities(t *testing.T) {
	inf := float32(math.Inf(-1))
	if got, want := HalfMask([]float32{0, inf, inf, 0}), []byte{0, 0, 0, 0xfc, 0, 0xfc, 0, 0}; !bytes.Equal(got, want) {
		t.Errorf("% x, not % x", got, want)
	}
}

func TestMirrorsAreWantedUnlessTheEnvironmentSaysNone(t *testing.T) {
	for value, wanted := range map[string]bool{"": true, "0": false, "\"0\"": false, "1": true, "4096": true} {
		t.Setenv("OLLAMA_PAGED_MIRROR", value)
		if Mirrors() != wanted {
			t.Errorf("OLLAMA_PAGED_MIRROR=%s: %v", value, Mirrors())
		}
	}
}
