package ollamarunner

import (
	"crypto/sha256"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvcache"
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/model"
	"github.com/ollama/ollama/model/input"
	"github.com/ollama/ollama/model/models/deepseekocr"
	"github.com/ollama/ollama/model/models/gemma3"
	"github.com/ollama/ollama/model/models/llama4"
	"github.com/ollama/ollama/model/models/mistral3"
)

// tierPictures are the images of one request.
type tierPictures struct{ multimodalStore }

// of returns an image as stock gives it to a model: each part has that number of inputs.
func (p tierPictures) of(image string, parts ...int) *input.Input {
	in := &input.Input{MultimodalHash: tierImageHash(7, []byte(image))}
	for _, n := range parts {
		in.Multimodal = append(in.Multimodal, input.Multimodal{Tensor: tierFakeNew(1, n)})
	}
	p.addMultimodal(in.Multimodal)
	return in
}

// tierArranged is what a model makes of inputs.
func tierArranged(t *testing.T, m any, inputs ...*input.Input) []*input.Input {
	t.Helper()
	arranged, err := m.(model.MultimodalProcessor).PostTokenize(inputs)
	if err != nil {
		t.Fatal(err)
	}
	return arranged
}

// askFor is ask for a request that has images.
func (f tierFake) askFor(t *testing.T, slot int, pictures tierPictures, prompt []*input.Input) int {
	return f.askOf(t, slot, &Sequence{inputs: prompt, mmStore: pictures.multimodalStore})
}

// finishOf is finish for a slot whose request has images.
func (f tierFake) finishOf(slot int, pictures tierPictures) {
	f.Lock()
	tierFinished(&Sequence{cache: &f.server.cache.slots[slot], mmStore: pictures.multimodalStore})
	f.Unlock()
	f.flush()
}

func TestTierEveryPartOfAnImageHasItsDigestAndIsASpan(t *testing.T) {
	f := newTierFake(t, 1, t.TempDir()+"/none.sock")
	digest := sha256.Sum256([]byte("cat"))
	for _, c := range []struct {
		model  any
		parts  []int
		rows   []uint32 // where the digest stands
		spans  []tiering.Span
		inputs int
	}{
		{&mistral3.Model{}, []int{3, 3}, []uint32{5, 9}, []tiering.Span{{First: 5, Last: 8}, {First: 9, Last: 12}}, 13 + 5},
		{&gemma3.Model{}, []int{4}, []uint32{7}, []tiering.Span{{First: 5, Last: 12}}, 13 + 5},
		{&llama4.Model{}, []int{4}, []uint32{7}, []tiering.Span{{First: 7, Last: 11}}, 12 + 5},
		{&deepseekocr.Model{}, []int{4}, []uint32{5}, []tiering.Span{{First: 5, Last: 8}}, 9 + 5},
	} {
		pictures := tierPictures{newMultimodalStore()}
		inputs := append(tierInputs(0, 5), pictures.of("cat", c.parts...))
		inputs = tierArranged(t, c.model, append(inputs, tierInputs(20, 25)...)...)
		p := tierPrompt(f.tierHost, inputs, pictures.multimodalStore)
		if len(p.Tokens) != c.inputs || len(inputs) != c.inputs || !slices.Equal(p.Spans, c.spans) {
			t.Errorf("%T: %d of %d inputs, spans %v", c.model, len(p.Tokens), len(inputs), p.Spans)
		}
		var rows []uint32
		for _, x := range p.Extras {
			rows = append(rows, x.Row)
			if !slices.Equal(x.Digest, digest[:]) {
				t.Errorf("%T: what stands at %d is not the digest of the image's bytes", c.model, x.Row)
			}
		}
		if !slices.Equal(rows, c.rows) {
			t.Errorf("%T: extras at %v", c.model, rows)
		}
	}
}

func TestTierAPromptEndsBeforeWhatCanNotBeTold(t *testing.T) {
	f := newTierFake(t, 1, t.TempDir()+"/none.sock")
	pictures := tierPictures{newMultimodalStore()}
	before, after := tierInputs(0, 5), tierInputs(20, 25)
	two := tierArranged(t, &mistral3.Model{}, pictures.of("cat", 3, 3), pictures.of("dog", 3))
	again := tierArranged(t, &mistral3.Model{}, pictures.of("cat", 3, 3))
	gemma := tierArranged(t, &gemma3.Model{}, pictures.of("cat", 3))
	foreign := tierArranged(t, &mistral3.Model{}, tierPictures{newMultimodalStore()}.of("cat", 3, 3))
	of := func(inputs ...[]*input.Input) []*input.Input { return slices.Concat(inputs...) }
	with := func(in []*input.Input, at int, change func(*input.Input)) []*input.Input {
		in = slices.Clone(in)
		changed := *in[at]
		change(&changed)
		in[at] = &changed
		return in
	}
	unknown := func(in *input.Input) { in.MultimodalHash = 12345 }
	none := func(in *input.Input) { in.MultimodalHash = 0 }
	for name, c := range map[string]struct {
		inputs []*input.Input
		want   int
	}{
		"two images":                          {of(before, two, after), 5 + 12 + 5},
		"the same one twice":                  {of(before, again, again, after), 5 + 16 + 5},
		"an image that nobody knows":          {of(before, with(two, 8, unknown), after), 5 + 8},
		"a part without a hash":               {of(before, with(two, 4, none), after), 5 + 4},
		"its span begins before it":           {of(before, with(gemma, 2, unknown), after), 5},
		"its span is not whole":               {of(before, gemma[:len(gemma)-1]), 5},
		"the first part was cut off":          {of(before, two[4:], after), 5},
		"the second part was cut off":         {of(before, two[:4], two[8:], after), 5 + 4 + 4 + 5},
		"parts of two images of the same":     {of(before, two[:4], again[4:], after), 5 + 4},
		"an image of another request":         {of(before, foreign, after), 5},
		"a part of one that is there already": {of(before, two[:8], again[4:], after), 5 + 8},
	} {
		p := tierPrompt(f.tierHost, c.inputs, pictures.multimodalStore)
		if len(p.Tokens) != c.want {
			t.Errorf("%s: %d inputs, want %d", name, len(p.Tokens), c.want)
		}
	}
	f.sharedPositions = true
	if p := tierPrompt(f.tierHost, of(before, two, after), pictures.multimodalStore); len(p.Tokens) != 5 || p.Extras != nil {
		t.Errorf("positions are shared: %d inputs", len(p.Tokens))
	}
}

func TestTierAnImageIsKnownByItsBytes(t *testing.T) {
	var m tierImages
	cat, dog := kvtier.Key(sha256.Sum256([]byte("cat"))), kvtier.Key(sha256.Sum256([]byte("dog")))
	hash := m.add(cat)
	if got, ok := m.digest(hash); !ok || got != cat || m.add(cat) != hash || hash == 0 {
		t.Errorf("the image with hash %x has digest %x", hash, got)
	}
	if m.add(dog) == hash {
		t.Error("two images have one hash")
	}
	var other tierImages
	if other.add(cat) == hash {
		t.Error("another process has the same hash: images with the same one can be made")
	}
	if _, ok := m.digest(0); ok {
		t.Error("what has no hash has a digest")
	}
	m.put(hash, dog)
	if got, ok := m.digest(hash); ok {
		t.Errorf("of two images with one hash the digest is %x", got)
	}
	m.put(hash, cat)
	if got, ok := m.digest(hash); ok {
		t.Errorf("of two images with one hash, the first again, the digest is %x", got)
	}
	for i := range tierImagesKnown {
		m.put(uint64(i+1000), cat)
	}
	if len(m.digests) != tierImagesKnown || len(m.order) != tierImagesKnown {
		t.Errorf("%d images are known", len(m.digests))
	}
	if _, ok := m.digest(m.add(dog)); !ok {
		t.Error("the last one is not known")
	}
}

func TestTierTheHashOfAnImageIsStocksWhereTheTieringIsOff(t *testing.T) {
	if got := tierImageHash(7, []byte("cat")); got != 7 {
		t.Errorf("off: %d", got)
	}
	newTierFake(t, 1, t.TempDir()+"/none.sock")
	if got := tierImageHash(7, []byte("cat")); got == 7 || got != tierImageHash(8, []byte("cat")) || got == tierImageHash(7, []byte("cau")) {
		t.Errorf("on: %d", got)
	}
}

func TestTierWhatFollowsAnImageIsRestoredForTheSameImageOnly(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	prompt := func(pictures tierPictures, image string, end int) []*input.Input {
		inputs := append(tierInputs(0, 80), pictures.of(image, 5, 5))
		return tierArranged(t, &mistral3.Model{}, append(inputs, tierInputs(500, end)...)...)
	}
	pictures := tierPictures{newMultimodalStore()}
	f.fill(0, prompt(pictures, "cat", 600), 3)
	f.finishOf(0, pictures)
	f.drop(0, 0)
	tierKnown = tierImages{} // another process
	for _, c := range []struct {
		image string
		end   int
		want  int
	}{
		{"cat", 601, 80 + 12 + 100}, // a longer prompt
		{"cat", 550, 80 + 12 + 49},  // the last input is computed
		{"cau", 601, 80},
		{"cat", 505, 80}, // the block with the image has more than the prompt
		{"", 601, 80},
	} {
		pictures := tierPictures{newMultimodalStore()}
		inputs := prompt(pictures, c.image, c.end)
		if c.image == "" { // a text with the same tokens
			inputs = slices.Clone(inputs)
			for i, in := range inputs {
				inputs[i] = &input.Input{Token: in.Token}
			}
		}
		if got := f.askFor(t, 1, pictures, inputs); got != c.want {
			t.Errorf("%q and %d inputs: resumes at %d, want %d", c.image, len(inputs), got, c.want)
		}
		f.holds(t, 1, 0, c.want, 3)
		encodes := slices.ContainsFunc(inputs[c.want:], func(in *input.Input) bool { return in.Multimodal != nil })
		if want := c.want == 80 && c.image != ""; encodes != want {
			t.Errorf("%q and %d inputs: an image is left to encode: %v", c.image, len(inputs), encodes)
		}
		f.drop(1, 0)
	}
}

// The last block of what is stored has the image, and a prompt that goes on after all of it finds it.
func TestTierABlockThatIsNotWholeIsFoundWithItsImage(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	prompt := func(pictures tierPictures, image string, end int) []*input.Input {
		inputs := append(tierInputs(0, 80), pictures.of(image, 5, 5))
		return tierArranged(t, &mistral3.Model{}, append(inputs, tierInputs(500, end)...)...)
	}
	pictures := tierPictures{newMultimodalStore()}
	f.fill(0, prompt(pictures, "cat", 510), 3)
	f.finishOf(0, pictures)
	f.drop(0, 0)
	for _, c := range []struct {
		image string
		end   int
		want  int
	}{
		{"cat", 511, 80 + 12 + 10},
		{"cat", 700, 80 + 12 + 10},
		{"cat", 510, 80 + 12 + 9},
		{"cat", 509, 80}, // less than all of the block
		{"cau", 700, 80},
	} {
		pictures := tierPictures{newMultimodalStore()}
		if got := f.askFor(t, 1, pictures, prompt(pictures, c.image, c.end)); got != c.want {
			t.Errorf("%q, %d: resumes at %d, want %d", c.image, c.end, got, c.want)
		}
		f.holds(t, 1, 0, c.want, 3)
		f.drop(1, 0)
	}
}

// An image of gemma3 is computed without a mask: its rows see what comes after them in their batch. What comes before it ends
// before its span, for there a window is of use.
func TestTierRowsThatSeeWhatComesAfterThemAreNeverStored(t *testing.T) {
	for _, unmasked := range []bool{false, true} {
		f := newTierFakeWithSidecarOf(t, tierTestWindow)
		pictures := tierPictures{newMultimodalStore()}
		inputs := append(tierInputs(0, 60), pictures.of("cat", 4))
		inputs = tierArranged(t, &gemma3.Model{}, append(inputs, tierInputs(500, 520)...)...)
		var batch input.Batch // its first input is the prompt's at 40
		for i := range 40 {
			batch.Positions, batch.Sequences = append(batch.Positions, int32(40+i)), append(batch.Sequences, 0)
		}
		var except []int
		if unmasked {
			except = []int{22, 23, 24, 25}
		}
		f.Lock()
		cache := f.server.cache.cache.(*kvcache.WrapperCache)
		cache.SetLayerType(1)
		cache.UnderlyingCache().(*kvcache.Causal).SetCausal(nil, kvcache.CausalOptions{Except: except})
		tierBuilt(nil, 7, batch, inputs[40:80], nil)
		f.Unlock()
		tierComputeEnd(7)
		f.fill(0, inputs, 3)
		f.finishOf(0, pictures)
		f.drop(0, 0)
		want := map[bool]int{false: len(inputs), true: 60}[unmasked]
		if got := f.askFor(t, 1, pictures, append(inputs, tierInputs(600, 602)...)); got != want {
			t.Errorf("unmasked %v: resumes at %d, want %d", unmasked, got, want)
		}
	}
}

func TestTierASpanThatIsNotComputedWholeIsNeverStored(t *testing.T) {
	const all = 80 + 9 + 100
	for resume, want := range map[int32]int{80: all - 1, 81: 80, 88: 80, 89: all - 1} { // the image is at 80 to 87, its end at 88
		f := newTierFakeWithSidecar(t)
		pictures := tierPictures{newMultimodalStore()}
		inputs := append(tierInputs(0, 80), pictures.of("cat", 8))
		inputs = tierArranged(t, &mistral3.Model{}, append(inputs, tierInputs(500, 600)...)...)
		f.Lock()
		tierRestore(&f.server.cache.slots[0], inputs, resume, false)
		f.Unlock()
		f.fill(0, inputs, 3)
		f.finishOf(0, pictures)
		f.drop(0, 0)
		if got := f.askFor(t, 1, pictures, inputs); got != want {
			t.Errorf("gone on with at %d: %d rows were stored, want %d", resume, got, want)
		}
	}
}

func TestTierAShiftSavesWhatFollowsAnImage(t *testing.T) {
	for _, running := range []bool{true, false} {
		f := newTierFakeWithSidecar(t)
		pictures := tierPictures{newMultimodalStore()}
		inputs := append(tierInputs(0, 80), pictures.of("cat", 8))
		inputs = tierArranged(t, &mistral3.Model{}, append(inputs, tierInputs(500, 600)...)...)
		f.fill(0, inputs[:160], 3)
		slot := &f.server.cache.slots[0]
		seq := &Sequence{cache: slot, mmStore: pictures.multimodalStore}
		f.Lock()
		if running {
			f.server.seqs = []*Sequence{seq}
		} else {
			tierFinished(seq) // what it has said then stays
		}
		tierBeforeShift(slot, 64)
		f.Unlock()
		f.flush()
		if got := f.askFor(t, 1, pictures, inputs); got != 160 {
			t.Errorf("running %v: resumes at %d", running, got)
		}
	}
}
