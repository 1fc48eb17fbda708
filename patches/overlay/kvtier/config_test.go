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
