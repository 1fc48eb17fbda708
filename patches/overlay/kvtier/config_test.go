package kvtier

import "testing"

func TestEncodingIsNoneUnlessAskedForByItsName(t *testing.T) {
	t.Setenv("OLLAMA_KV_TIERING", "1")
	for value, want := range map[string]string{"": "", "none": "", "zstd": "", "Q8_0": "", "q8_0": ";kv=q8_0", ` "q8_0" `: ";kv=q8_0"} {
		t.Setenv("OLLAMA_KV_TIER_ENCODING", value)
		c, on := FromEnv()
		if !on || c.NamespaceExtra() != want {
			t.Errorf("%q: on %v, extra %q, want %q", value, on, c.NamespaceExtra(), want)
		}
	}
}

func TestTieringIsOffUnlessAskedFor(t *testing.T) {
	for value, want := range map[string]bool{"": false, "0": false, "false": false, `"0"`: false, "1": true, "true": true, ` "1" `: true, "on": true} {
		t.Setenv("OLLAMA_KV_TIERING", value)
		if _, on := FromEnv(); on != want || On() != want {
			t.Errorf("%q: on %v, %v, want %v", value, on, On(), want)
		}
	}
}

func TestCPUAttentionIsStockUnlessAskedForByItsName(t *testing.T) {
	for value, want := range map[string]bool{"": false, "stock": false, "exact": true, ` "exact" `: true, "Exact": false, "1": false} {
		t.Setenv("OLLAMA_CPU_ATTENTION", value)
		if got := cpuAttentionExact(); got != want {
			t.Errorf("%q: exact %v, want %v", value, got, want)
		}
	}
}

func TestAttentionIsPartOfTheNamespaceOnlyWhereItComputes(t *testing.T) {
	for _, state := range []string{"", "stock", "exact (avx512)"} {
		if got := AttentionExtra(state, false); got != "" {
			t.Errorf("%q, not asked for: %q", state, got)
		}
	}
	for state, want := range map[string]string{
		"": "", "stock": ";columns=1", "stock (flash attention is off)": ";columns=1",
		"exact (avx512)": ";attention=exact.2.avx512",
		"exact (avx2), but stock where it is too long": ";attention=exact.2.avx2",
	} {
		if got := AttentionExtra(state, true); got != want {
			t.Errorf("%q: %q, want %q", state, got, want)
		}
	}
}
