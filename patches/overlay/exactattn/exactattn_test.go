package exactattn

import "testing"

func TestAttentionIsStockUnlessTheExactOneIsAskedForByItsName(t *testing.T) {
	for value, want := range map[string]bool{"": false, "stock": false, "exact": true, ` "exact" `: true, "Exact": false, "1": false} {
		t.Setenv("OLLAMA_CPU_ATTENTION", value)
		if got := asked(); got != want {
			t.Errorf("%q: exact %v, want %v", value, got, want)
		}
	}
}

func TestExactAttentionHasAnIdentityOnlyWhereItComputes(t *testing.T) {
	for _, state := range []string{"", "stock", "exact (avx512)"} {
		if name, value := Identity(state, false); name != "" || value != "" {
			t.Errorf("%q, not asked for: %q is %q", state, name, value)
		}
	}
	for state, want := range map[string][2]string{
		"": {}, "stock": {"columns", "1"}, "stock (flash attention is off)": {"columns", "1"},
		"exact (avx512)": {"attention", "exact.2.avx512"},
		"exact (avx2), but stock where it is too long": {"attention", "exact.2.avx2"},
	} {
		if name, value := Identity(state, true); name != want[0] || value != want[1] {
			t.Errorf("%q: %q is %q, want %q", state, name, value, want)
		}
	}
}
