package kvtier

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ollama/ollama/exactattn"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// vectors reads a golden file of the tiering project; KVTIER_VECTORS names its tests/vectors.
func vectors(t *testing.T, name string, into any) string {
	t.Helper()
	dir := os.Getenv("KVTIER_VECTORS")
	if dir == "" {
		t.Skip("KVTIER_VECTORS does not name the directory of the golden vectors")
	}
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatal(err)
	}
	return dir
}

type vectorExtra struct {
	Row    int
	Digest string
}

// What was stored before there was another attention than ggml's must stay valid; what the other computes must not be
// taken for it.
func TestTheNamespaceOfAnAttentionEqualsTheGoldenVectors(t *testing.T) {
	var v struct {
		Namespaces []struct{ Name, Digest string }
	}
	vectors(t, "keys.json", &v)
	layer := Layer{Kind: "full", KVHeads: 8, KHeadDim: 128, VHeadDim: 128}
	second := layer
	second.Layer = 1
	d := Description{
		Model: "sha256-" + strings.Repeat("a", 64), Engine: EngineName("ollama-go", "0.16.3", "0123456789abcdef"), CacheDType: "f16",
		Layers: []Layer{layer, second}, FlashAttention: true,
	}
	compared := 0
	for _, n := range v.Namespaces {
		if n.Name != "stock attention" && n.Name != "exact attention" {
			continue
		}
		d.Extra = "devices=none" + Part("cpu", "AVX2,FMA") + Part("libc", "2.36 fma") + Part("rows", "hh") +
			Part(exactattn.Identity(strings.Fields(n.Name)[0]+" (avx2)", n.Name == "exact attention"))
		if got := hexOf(NamespaceOf(d.Proto())); got != n.Digest {
			t.Errorf("%s: %s, want %s", n.Name, got, n.Digest)
		}
		compared++
	}
	if compared != 2 {
		t.Fatalf("%d namespaces in the vectors, want 2", compared)
	}
}

func TestKeysEqualTheGoldenVectors(t *testing.T) {
	var v struct {
		Namespaces []struct {
			Name   string
			Fields []struct{ Name, Value string }
			Digest string
		}
		Chains []struct {
			Name, Namespace string
			BlockTokens     int `json:"block_tokens"`
			Tokens          []int32
			Extras          []vectorExtra
			Keys            []string
			TailKey         *string `json:"tail_key"`
		}
	}
	vectors(t, "keys.json", &v)
	namespaces := map[string]Namespace{}
	for _, n := range v.Namespaces {
		d := &tierpb.Namespace{}
		for _, f := range n.Fields {
			d.Fields = append(d.Fields, &tierpb.NamespaceField{Name: f.Name, Value: f.Value})
		}
		namespaces[n.Name] = NamespaceOf(d)
		if got := hexOf(namespaces[n.Name]); got != n.Digest {
			t.Errorf("namespace %s: %s, want %s", n.Name, got, n.Digest)
		}
	}
	if len(v.Chains) == 0 {
		t.Fatal("no chains in the vectors")
	}
	for _, c := range v.Chains {
		encoded, parent, keys := TokenBytes(c.Tokens), namespaces[c.Namespace], []string{}
		for at := 0; at < len(c.Tokens); at += c.BlockTokens {
			end := min(at+c.BlockTokens, len(c.Tokens))
			var extras []Extra
			for _, x := range c.Extras {
				if x.Row >= at && x.Row < end {
					extras = append(extras, Extra{Row: uint32(x.Row - at), Digest: unhex(t, x.Digest)})
				}
			}
			parent = BlockKey(parent, encoded[4*at:4*end], extras, nil)
			keys = append(keys, hexOf(parent))
		}
		want := c.Keys
		if c.TailKey != nil {
			want = append(want, *c.TailKey)
		}
		if len(keys) != len(want) {
			t.Fatalf("%s: %d keys, want %d", c.Name, len(keys), len(want))
		}
		for i := range keys {
			if keys[i] != want[i] {
				t.Errorf("%s: key %d is %s, want %s", c.Name, i, keys[i], want[i])
			}
		}
		if c.BlockTokens == BlockTokens {
			var extras []Extra
			for _, x := range c.Extras {
				extras = append(extras, Extra{Row: uint32(x.Row), Digest: unhex(t, x.Digest)})
			}
			for i, key := range Chain(namespaces[c.Namespace], encoded, extras) {
				if hexOf(key) != c.Keys[i] {
					t.Errorf("%s: Chain's key %d is %s, want %s", c.Name, i, hexOf(key), c.Keys[i])
				}
			}
		}
	}
}

func hexOf(k Key) string { return hex.EncodeToString(k[:]) }

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
