package kvtier

import (
	"os"
	"strings"
	"testing"
)

func TestDescriptionsGiveTheFieldsAndDigestsOfTheGoldenVectors(t *testing.T) {
	type layer struct {
		Child, Layer int
		Kind         string
		Window       int
		KVHeads      int `json:"kv_heads"`
		KHeadDim     int `json:"k_head_dim"`
		VHeadDim     int `json:"v_head_dim"`
	}
	var v struct {
		Descriptions []struct {
			Name        string
			Description struct {
				Model, Engine, Extra string
				Adapters             []string
				CacheDType           string `json:"cache_dtype"`
				FlashAttention       bool   `json:"flash_attention"`
				Layers               []layer
			}
			Fields []struct{ Name, Value string }
			Digest string
		}
	}
	vectors(t, "descriptions.json", &v)
	if len(v.Descriptions) < 13 {
		t.Fatalf("%d descriptions in the vectors", len(v.Descriptions))
	}
	for _, want := range v.Descriptions {
		given := want.Description
		d := Description{
			Model: given.Model, Adapters: given.Adapters, Engine: given.Engine, CacheDType: given.CacheDType,
			FlashAttention: given.FlashAttention, Extra: given.Extra,
		}
		for _, l := range given.Layers {
			d.Layers = append(d.Layers, Layer{
				Child: l.Child, Layer: l.Layer, Kind: l.Kind, Window: l.Window, KVHeads: l.KVHeads, KHeadDim: l.KHeadDim, VHeadDim: l.VHeadDim,
			})
		}
		proto := d.Proto()
		if len(proto.Fields) != len(want.Fields) {
			t.Fatalf("%s: %d fields, want %d", want.Name, len(proto.Fields), len(want.Fields))
		}
		for i, f := range proto.Fields {
			if f.Name != want.Fields[i].Name || f.Value != want.Fields[i].Value {
				t.Errorf("%s: field %q is %q, want %q %q", want.Name, f.Name, f.Value, want.Fields[i].Name, want.Fields[i].Value)
			}
		}
		if got := hexOf(NamespaceOf(proto)); got != want.Digest {
			t.Errorf("%s: %s, want %s", want.Name, got, want.Digest)
		}
	}
}

func TestSettingsMeanWhatTheGoldenVectorsSay(t *testing.T) {
	type setting struct {
		Name          string
		Env           map[string]string
		Socket, Extra string
	}
	var v struct{ Sockets, Extras []setting }
	vectors(t, "settings.json", &v)
	if len(v.Sockets) == 0 || len(v.Extras) == 0 {
		t.Fatal("no settings in the vectors")
	}
	for _, want := range append(v.Sockets, v.Extras...) {
		t.Run(want.Name, func(t *testing.T) {
			for _, name := range []string{
				"HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "OLLAMA_KV_TIER_SOCKET", "OLLAMA_KV_TIER_ENCODING", "OLLAMA_KV_TIER_SALT",
			} {
				t.Setenv(name, "") // so that it is put back
				os.Unsetenv(name)
			}
			t.Setenv("OLLAMA_KV_TIERING", "1")
			own := t.TempDir()
			if err := os.Chmod(own, 0o700); err != nil {
				t.Fatal(err)
			}
			for name, value := range want.Env {
				t.Setenv(name, strings.ReplaceAll(value, "{own}", own))
			}
			want.Socket = strings.ReplaceAll(want.Socket, "{own}", own)
			c, on := FromEnv()
			if !on {
				t.Fatal("the tiering is off")
			}
			if want.Socket != "" && c.Socket != want.Socket {
				t.Errorf("socket %s, want %s", c.Socket, want.Socket)
			}
			if got := c.NamespaceExtra(); got != want.Extra {
				t.Errorf("extra %q, want %q", got, want.Extra)
			}
		})
	}
}
