package llama

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/ml"
)

const tierTestBatch, tierTestSlots = 128, 2

const tierTestLlama, tierTestGemma2 = "KVTIER_TEST_LLAMA", "KVTIER_TEST_GEMMA2"

// tierTestContext loads the model that a variable names.
func tierTestContext(t *testing.T, variable string, flash ml.FlashAttentionType, dtype string) *Context {
	t.Helper()
	path := os.Getenv(variable)
	if path == "" {
		t.Skip(variable + " does not name a model of the llama.cpp engine")
	}
	BackendInit()
	model, err := LoadModelFromFile(path, ModelParams{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { FreeModel(model) })
	c, err := NewContextWithModel(model, NewContextParams(1024*tierTestSlots, tierTestBatch, tierTestSlots, 1, flash, dtype))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// decode computes tokens from position from on and returns the logits of the last.
func decode(t *testing.T, c *Context, seq, from int, tokens []int) []float32 {
	t.Helper()
	batch, err := NewBatch(tierTestBatch, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer batch.Free()
	last := 0
	for start := 0; start < len(tokens); start += tierTestBatch {
		batch.Clear()
		for i, token := range tokens[start:min(start+tierTestBatch, len(tokens))] {
			batch.Add(token, nil, from+start+i, start+i+1 == len(tokens), seq)
		}
		if err := c.Decode(batch); err != nil {
			t.Fatal(err)
		}
		last = batch.NumTokens() - 1
	}
	c.Synchronize()
	return c.GetLogitsIth(last)
}

// streamTensor is a sequence's part of a tensor.
type streamTensor struct {
	KVTierTensor
	base int
}

func (s streamTensor) KVTierHost() []byte { return s.KVTierTensor.KVTierHost()[s.base:] }

func planesOf(c *Context, info KVTierContext, seq int) (planes []rows.Plane) {
	for _, l := range c.KVTierLayers() {
		planes = append(planes,
			rows.Plane{Tensor: streamTensor{l.K, seq * l.KStreamBytes}, RowBytes: l.KRowBytes, Cells: info.Cells},
			rows.Plane{Tensor: streamTensor{l.V, seq * l.VStreamBytes}, RowBytes: l.VRowBytes, Cells: info.Cells, Permuted: l.VTransposed})
	}
	return planes
}

func upTo(from, to int) []int32 {
	cells := make([]int32, to-from)
	for i := range cells {
		cells[i] = int32(from + i)
	}
	return cells
}

func TestRowsThatArePutBackAreAsIfTheyHadNeverGone(t *testing.T) {
	for _, test := range []struct {
		flash ml.FlashAttentionType
		dtype string
	}{
		{ml.FlashAttentionEnabled, "f16"}, {ml.FlashAttentionDisabled, "f16"}, {ml.FlashAttentionEnabled, "q8_0"}, {ml.FlashAttentionEnabled, "q4_0"},
	} {
		t.Run(fmt.Sprintf("flash=%v,%s", test.flash, test.dtype), func(t *testing.T) {
			c := tierTestContext(t, tierTestLlama, test.flash, test.dtype)
			const seq, n, kept = 1, 300, 100
			info, reason := c.KVTierDescribe()
			if reason != "" || info.Streams != tierTestSlots || info.Children != 1 || info.Cells != 1024 || !info.ExactShift {
				t.Fatalf("%+v %q", info, reason)
			}
			tokens := make([]int, n)
			for i := range tokens {
				tokens[i] = 5 + 7*i%200
			}
			decode(t, c, 0, 0, tokens[:50]) // another sequence's rows lie in the first stream
			decode(t, c, seq, 0, tokens)
			c.KvCacheSeqRm(seq, n-1, -1)
			want := decode(t, c, seq, n-1, tokens[n-1:]) // an in-memory hit
			c.KvCacheSeqRm(seq, n-1, -1)

			cells, positions := c.KVTierCells(0, seq, info.Cells)
			if !slices.Equal(cells, upTo(0, n-1)) || !slices.Equal(positions, upTo(0, n-1)) {
				t.Fatalf("cells %v hold %v", cells, positions)
			}
			planes := planesOf(c, info, seq)
			saved := make([][]byte, len(planes))
			for i, p := range planes {
				saved[i] = make([]byte, p.RowBytes*(n-1-kept))
				p.Read(upTo(kept, n-1), saved[i])
				if got := p.Tensor.(streamTensor).KVTierType(); got != test.dtype {
					t.Fatalf("type %s", got)
				}
			}
			restore := func(data func(i int) []byte) []float32 {
				c.KvCacheSeqRm(seq, kept, -1)
				found := c.KVTierFind(0, seq, kept, n-1-kept)
				if !slices.Equal(found, upTo(kept, n-1)) {
					t.Fatalf("llama.cpp would use %v", found)
				}
				for i, p := range planes {
					p.Write(found, rows.Chunk{Data: data(i)})
				}
				if c.KVTierOccupy(0, seq, kept, upTo(kept+1, n)) {
					t.Fatal("other cells than llama.cpp's own were taken")
				}
				if !c.KVTierOccupy(0, seq, kept, found) {
					t.Fatal("the cells were not taken")
				}
				if cells, positions := c.KVTierCells(0, seq, info.Cells); !slices.Equal(cells, upTo(0, n-1)) || !slices.Equal(positions, upTo(0, n-1)) {
					t.Fatalf("cells %v hold %v", cells, positions)
				}
				logits := decode(t, c, seq, n-1, tokens[n-1:])
				c.KvCacheSeqRm(seq, n-1, -1)
				return logits
			}
			if slices.Equal(restore(func(i int) []byte { return make([]byte, len(saved[i])) }), want) {
				t.Error("rows of zeros make no difference: the test sees nothing")
			}
			if !slices.Equal(restore(func(i int) []byte { return saved[i] }), want) {
				t.Error("logits differ from those of the in-memory hit")
			}
			if cells, _ := c.KVTierCells(0, 0, info.Cells); !slices.Equal(cells, upTo(0, 50)) {
				t.Errorf("the other sequence's cells are %v", cells)
			}
		})
	}
}

// Every other layer of this model sees 128 positions. Ollama lets the cache of those layers keep all rows.
func TestBothCachesOfAModelWithWindowsArePutBack(t *testing.T) {
	for _, flash := range []ml.FlashAttentionType{ml.FlashAttentionEnabled, ml.FlashAttentionDisabled} {
		t.Run(fmt.Sprintf("flash=%v", flash), func(t *testing.T) {
			c := tierTestContext(t, tierTestGemma2, flash, "f16")
			const seq, n, resume, kept, window = 1, 400, 200, 30, 128
			info, reason := c.KVTierDescribe()
			if reason != "" || info.Children != 2 || info.Cells != 1024 {
				t.Fatalf("%+v %q", info, reason)
			}
			geometry := ""
			for _, l := range c.KVTierLayers() {
				geometry += fmt.Sprintf("%d:%d:%d ", l.Child, l.Layer, l.Window)
			}
			if geometry != "0:1:0 0:3:0 1:0:128 1:2:128 " {
				t.Fatalf("child, layer and window: %s", geometry)
			}
			tokens := make([]int, n)
			for i := range tokens {
				tokens[i] = 32 + 7*i%90
			}
			decode(t, c, seq, 0, tokens)
			for child := range info.Children {
				if cells, positions := c.KVTierCells(child, seq, info.Cells); !slices.Equal(cells, upTo(0, n)) || !slices.Equal(positions, upTo(0, n)) {
					t.Fatalf("cache %d: cells %v hold %v", child, cells, positions)
				}
			}
			c.KvCacheSeqRm(seq, resume, -1)
			want := decode(t, c, seq, resume, tokens[resume:resume+1]) // an in-memory hit, far behind what there was
			c.KvCacheSeqRm(seq, resume, -1)

			planes := planesOf(c, info, seq) // K and V of two layers of the one cache, then of two of the other
			saved := make([][]byte, len(planes))
			for i, p := range planes {
				saved[i] = make([]byte, p.RowBytes*(resume-kept))
				p.Read(upTo(kept, resume), saved[i])
			}
			restore := func(data func(i int) []byte) []float32 {
				c.KvCacheSeqRm(seq, kept, -1)
				for child := range info.Children {
					if found := c.KVTierFind(child, seq, kept, resume-kept); !slices.Equal(found, upTo(kept, resume)) {
						t.Fatalf("cache %d: llama.cpp would use %v", child, found)
					}
				}
				for i, p := range planes {
					p.Write(upTo(kept, resume), rows.Chunk{Data: data(i)})
				}
				for child := range info.Children {
					if !c.KVTierOccupy(child, seq, kept, upTo(kept, resume)) {
						t.Fatalf("cache %d did not take the cells", child)
					}
				}
				logits := decode(t, c, seq, resume, tokens[resume:resume+1])
				c.KvCacheSeqRm(seq, resume, -1)
				return logits
			}
			zeros := func(first, last, rows int) func(i int) []byte { // the first rows of some planes
				return func(i int) []byte {
					data := slices.Clone(saved[i])
					if first <= i && i < last {
						clear(data[:rows*planes[i].RowBytes])
					}
					return data
				}
			}
			// Position resume sees the rows from here on through a window.
			unseen := resume + 1 - window - kept
			for _, test := range []struct {
				name string
				data func(i int) []byte
				same bool
			}{
				{"everything", func(i int) []byte { return saved[i] }, true},
				{"zeros in the cache without windows", zeros(0, 4, 1), false},
				{"zeros in the cache of windows, as far as one reaches", zeros(4, 8, unseen+1), false},
				{"zeros in the cache of windows, beyond them", zeros(4, 8, unseen), true},
				{"the caches exchanged", func(i int) []byte { return saved[(i+4)%8] }, false},
			} {
				if got := slices.Equal(restore(test.data), want); got != test.same {
					t.Errorf("%s: logits as of the in-memory hit: %v", test.name, got)
				}
			}
		})
	}
}

func TestTheSizeOfTheContextChoosesTheTableOfRoPE(t *testing.T) {
	c := tierTestContext(t, tierTestLlama, ml.FlashAttentionEnabled, "f16")
	short, _ := c.KVTierDescribe()
	large, err := NewContextWithModel(c.Model(), NewContextParams(33<<10, tierTestBatch, 1, 1, ml.FlashAttentionEnabled, "f16"))
	if err != nil {
		t.Fatal(err)
	}
	long, reason := large.KVTierDescribe()
	if reason != "" || long.Streams != 1 || short.RoPE == long.RoPE {
		t.Errorf("%+v and %+v %q", short, long, reason)
	}
	if rest := strings.TrimPrefix(long.RoPE, "long"); rest != strings.TrimPrefix(short.RoPE, "short") || len(rest) < 40 {
		t.Errorf("%q and %q", short.RoPE, long.RoPE)
	}
}

func TestALayoutThatIsNotUnderstoodIsNeverWrittenTo(t *testing.T) {
	c := tierTestContext(t, tierTestLlama, ml.FlashAttentionEnabled, "f16")
	if cells, _ := c.KVTierCells(7, 0, 1024); cells != nil {
		t.Errorf("a cache that there is not: %v", cells)
	}
	if cells := c.KVTierFind(0, 0, 0, 4096); cells != nil {
		t.Errorf("more cells than there are: %v", cells)
	}
	if cells := c.KVTierFind(0, 0, 0, 0); cells != nil {
		t.Errorf("no cells: %v", cells)
	}
	decode(t, c, 0, 0, []int{5, 6, 7})
	if cells, _ := c.KVTierCells(0, 0, 2); cells != nil {
		t.Errorf("three cells in a list of two: %v", cells)
	}
}
