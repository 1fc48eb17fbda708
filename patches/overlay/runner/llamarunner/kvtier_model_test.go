package llamarunner

import (
	"slices"
	"strings"
	"testing"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
	"github.com/ollama/ollama/llama"
)

func TestTierLayersSayHowFarTheySee(t *testing.T) {
	layers := tierLayers([]llama.KVTierLayer{
		{Child: 0, Layer: 1, KVHeads: 2, KHeadDim: 64, VHeadDim: 32},
		{Child: 1, Layer: 0, Window: 128},
		{Child: 1, Layer: 2, Window: 8192, Chunked: true},
	})
	fields := kvtier.Description{Layers: layers}.Proto().Fields
	at := slices.IndexFunc(fields, func(f *tierpb.NamespaceField) bool { return f.Name == "layers" })
	if got, want := fields[at].Value, "0:1:full:0:2:64:32;1:0:swa:128:0:0:0;1:2:chunked:8192:0:0:0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestTierRowsOfADeviceAreNotOnTheHost(t *testing.T) {
	if tierOnHost([]llama.KVTierLayer{{Device: llama.KVTierDevice{Library: "CUDA"}}}) { // whatever memory they lie in
		t.Error("they are there before the device has written them")
	}
}

func TestTierAdaptersAreNamedByTheirDigests(t *testing.T) {
	one, other := "sha256-"+strings.Repeat("0a", 32), "sha256-"+strings.Repeat("0b", 32)
	for _, test := range []struct {
		paths, blobs []string
		refused      string
	}{
		{nil, nil, ""},
		{[]string{"/models/blobs/" + one}, []string{one}, ""},
		{[]string{"/home/me/adapter.gguf"}, nil, "adapter.gguf"},
		{[]string{"/models/blobs/" + one + ".gguf"}, nil, "no blob"},
		{[]string{"/models/blobs/" + one, "/models/blobs/" + other}, nil, "several"},
	} {
		blobs, reason := tierAdapters(test.paths)
		if !slices.Equal(blobs, test.blobs) || (reason != "") != (test.refused != "") || !strings.Contains(reason, test.refused) {
			t.Errorf("%v: %v %q", test.paths, blobs, reason)
		}
	}
}

func TestTierTokensEndAtTheFirstImage(t *testing.T) {
	image := input{embed: []float32{1, 2}}
	text := func(tokens ...int) (inputs []input) {
		for _, token := range tokens {
			inputs = append(inputs, input{token: token})
		}
		return inputs
	}
	for name, test := range map[string]struct {
		inputs []input
		want   []int32
	}{
		"text":           {text(5, 0, 7), []int32{5, 0, 7}},
		"image behind":   {append(text(5, 6), image), []int32{5, 6}},
		"text behind it": {slices.Concat(text(5, 6), []input{image, image}, text(7, 8)), []int32{5, 6}},
		"image first":    {append([]input{image}, text(7, 8)...), nil},
		"nothing":        {nil, nil},
	} {
		if got := tierTokens(test.inputs); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}
