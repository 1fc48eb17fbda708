package llm

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/ollama/ollama/fs/ggml"
	"github.com/ollama/ollama/ml"
)

// pagedHeadsModel is a model of four layers whose heads have 64 values, if nothing of kv says otherwise.
func pagedHeadsModel(t *testing.T, kv ggml.KV) *ggml.GGML {
	t.Helper()
	of := ggml.KV{
		"general.architecture":              "paged",
		"paged.block_count":                 uint32(4),
		"paged.embedding_length":            uint32(512),
		"paged.attention.head_count":        uint32(8),
		"paged.attention.head_count_kv":     uint32(2),
		"paged.vision.attention.key_length": uint32(88), // no cache
	}
	for key, value := range kv {
		of["paged."+key] = value
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "model.gguf"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := ggml.WriteGGUF(f, of, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	model, err := ggml.Decode(f, -1)
	if err != nil {
		t.Fatal(err)
	}
	return model
}

func pagedLibraries(names ...string) []ml.DeviceInfo {
	var gpus []ml.DeviceInfo
	for _, name := range names {
		gpus = append(gpus, ml.DeviceInfo{DeviceID: ml.DeviceID{Library: name}})
	}
	return gpus
}

func TestPagedFlashAttentionIsForHeadsThatAGPUHasItFor(t *testing.T) {
	const k, v = "attention.key_length", "attention.value_length"
	for _, test := range []struct {
		name string
		kv   ggml.KV
		on   bool
	}{
		{"64 by division", nil, true},
		{"32 by division", ggml.KV{"embedding_length": uint32(256)}, false},
		{"128", ggml.KV{k: uint32(128), v: uint32(128)}, true},
		{"512 in layers that see all", ggml.KV{k: uint32(512), v: uint32(512), k + "_swa": uint32(256), v + "_swa": uint32(256)}, false},
		{"512 in layers with windows", ggml.KV{k: uint32(256), v: uint32(256), k + "_swa": uint32(512), v + "_swa": uint32(512)}, false},
		{"512 in V of windows", ggml.KV{k: uint32(256), v: uint32(256), k + "_swa": uint32(256), v + "_swa": uint32(512)}, false},
		{"256 everywhere", ggml.KV{k: uint32(256), v: uint32(256), k + "_swa": uint32(256), v + "_swa": uint32(256)}, true},
		{"one layer of 512", ggml.KV{k: []uint32{64, 64, 512, 64}, v: []uint32{64, 64, 512, 64}}, false},
		{"layers of 64 and 128", ggml.KV{k: []uint32{64, 64, 128, 64}, v: []uint32{64, 64, 128, 64}}, true},
		{"K and V differ in windows", ggml.KV{k: uint32(64), v: uint32(64), k + "_swa": uint32(128), v + "_swa": uint32(64)}, false},
		{"K and V differ", ggml.KV{k: uint32(128), v: uint32(64)}, false},
		{"a type that is not known", ggml.KV{k: uint32(64), v: uint32(64), k + "_swa": "many"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("OLLAMA_PAGED_ATTN", "1")
			model := pagedHeadsModel(t, test.kv)
			if on := pagedFlashAttention(false, false, pagedLibraries("CUDA"), model); on != test.on {
				t.Errorf("%v", on)
			}
			if !pagedFlashAttention(true, false, pagedLibraries("CUDA"), model) {
				t.Error("what stock turns on stays on")
			}
		})
	}
}

func TestPagedFlashAttentionIsLeftToStockWhereNothingCanBePaged(t *testing.T) {
	model := pagedHeadsModel(t, nil)
	for _, test := range []struct {
		name      string
		variable  string
		userSet   bool
		libraries []string
		on        bool
	}{
		{"a GPU of NVIDIA", "1", false, []string{"CUDA"}, true},
		{"one of two", "1", false, []string{"Vulkan", "CUDA"}, true},
		{"of AMD", "1", false, []string{"ROCm"}, false},
		{"by Vulkan", "1", false, []string{"Vulkan"}, false},
		{"no GPU", "1", false, nil, false},
		{"variable unset", "", false, []string{"CUDA"}, false},
		{"the user said no", "1", true, []string{"CUDA"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("OLLAMA_PAGED_ATTN", test.variable)
			if on := pagedFlashAttention(false, test.userSet, pagedLibraries(test.libraries...), model); on != test.on {
				t.Errorf("%v", on)
			}
		})
	}
}
