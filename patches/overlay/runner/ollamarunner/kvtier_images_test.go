package ollamarunner

import (
	"slices"
	"testing"
	"unicode"

	"github.com/ollama/ollama/model/input"
	"github.com/ollama/ollama/model/models/glmocr"
	"github.com/ollama/ollama/model/models/mistral3"
	"github.com/ollama/ollama/model/models/qwen25vl"
	"github.com/ollama/ollama/model/models/qwen3vl"
)

// tierImageOf is the first input of an image.
func tierImageOf(hash uint64) *input.Input {
	return &input.Input{Token: 10, Multimodal: []input.Multimodal{{}}, MultimodalHash: hash, SameBatch: 4}
}

func TestTierTokensEndBeforeTheFirstImage(t *testing.T) {
	for name, image := range map[string]*input.Input{
		"hash":      {Token: 3, MultimodalHash: 9},
		"image":     {Token: 3, Multimodal: []input.Multimodal{{}}},
		"its batch": {Token: 3, SameBatch: 7}, // gemma3 begins with two tokens that are none
	} {
		inputs := tierInputs(0, 5)
		inputs[3] = image
		if got := tierTokens(inputs); !slices.Equal(got, []int32{0, 1, 2}) {
			t.Errorf("%s: tokens %v", name, got)
		}
	}
}

func TestTierWhatComesBeforeAnImageThatNobodyKnowsIsStoredAndRestored(t *testing.T) {
	f := newTierFakeWithSidecar(t)
	prompt := append(tierInputs(0, 80), tierImageOf(9))
	f.fill(0, append(slices.Clone(prompt), tierInputs(500, 600)...), 3)
	f.finish(0)
	f.drop(0, 0)
	if got := f.ask(t, 1, append(slices.Clone(prompt), tierInputs(500, 503)...)); got != 80 {
		t.Errorf("the same prompt resumes at %d: all 80 tokens before the image are stored", got)
	}
	f.holds(t, 1, 0, 80, 3)
	f.drop(1, 0)
	if got := f.ask(t, 1, append(tierInputs(0, 70), tierImageOf(8))); got != 70 {
		t.Errorf("another image, and earlier: resumes at %d", got)
	}
	f.drop(1, 0)
	if got := f.ask(t, 1, tierInputs(0, 80)); got != 79 {
		t.Errorf("no image: resumes at %d, the last token is computed", got)
	}
	f.drop(1, 0)
	if got := f.ask(t, 1, append([]*input.Input{tierImageOf(9)}, tierInputs(0, 80)...)); got != 0 {
		t.Errorf("the image first: resumes at %d", got)
	}
}

func TestTierModelsThatKeepPositionsAreKnown(t *testing.T) {
	for _, model := range []any{&qwen3vl.Model{}, &qwen25vl.Model{}, &glmocr.Model{}} {
		if !tierSharesPositions(model) {
			t.Errorf("%T keeps positions", model)
		}
	}
	for _, model := range []any{&mistral3.Model{}, nil, 7} {
		if tierSharesPositions(model) {
			t.Errorf("%T keeps none", model)
		}
	}
}

// computed says that the slot's request goes on: its rows are in the cells.
func (f tierFake) computed(slot int, inputs []*input.Input, salt byte) {
	f.Lock()
	defer f.Unlock()
	s := &f.server.cache.slots[slot]
	have := len(s.Inputs)
	cells := f.rows.Find(slot, have, len(inputs)-have, nil)
	all := make([]byte, len(cells)*tierFakeRowBytes)
	for i := range all {
		all[i] = byte(have+i/tierFakeRowBytes) + salt
	}
	f.writeBytes(cells, all)
	f.rows.Occupy(slot, have, cells)
	s.Inputs = inputs
}

func TestTierRowsComputedAtAnothersPositionsAreNeverStored(t *testing.T) {
	text, image := tierInputs(0, 300), append(tierInputs(1000, 1100), tierImageOf(9))
	other := tierInputs(2000, 2001)
	// a capital begins to arrange a prompt, a small letter has arranged it: the text, the image, the other text
	prompts := map[rune][]*input.Input{'T': text, 'I': image, 'O': other}
	for name, c := range map[string]struct {
		shared bool
		before string // before the text is given its slot
		during string // after 100 of its 300 rows
		stored int
	}{
		"alone":                                  {true, "Tt", "", 300},
		"an image comes meanwhile":               {true, "Tt", "Ii", 100},
		"an image comes and is not yet arranged": {true, "Tt", "I", 100},
		"of a model without positions":           {false, "Tt", "Ii", 300},
		"another text comes meanwhile":           {true, "Tt", "Oo", 300},
		"an image came, it waits":                {true, "TtIi", "", 0},
		"an image came, then another text":       {true, "TtIiOo", "", 300},
		"an image came before it":                {true, "IiTt", "", 300},
		"an image came while it was arranged":    {true, "TIit", "", 0},
		"it came while an image was arranged":    {true, "ITit", "", 0},
		"an image is arranged at last":           {true, "ITti", "", 0},
		"an image, and a text that is not over":  {true, "IiOTt", "", 300},
	} {
		t.Run(name, func(t *testing.T) {
			f := newTierFakeWithSidecar(t)
			f.sharedPositions = c.shared
			arranged := map[rune]func(){}
			do := func(steps string) {
				for _, step := range steps {
					if end, ok := arranged[unicode.ToUpper(step)]; ok && unicode.IsLower(step) {
						end()
					} else {
						arranged[step] = tierTokenised(f.server, prompts[step])
					}
				}
			}
			do(c.before)
			slot := &f.server.cache.slots[0]
			f.Lock()
			tierRestore(slot, text, 0, true)
			f.server.seqs = []*Sequence{{cache: slot}}
			f.Unlock()
			f.computed(0, text[:100], 3)
			do(c.during)
			f.computed(0, text, 3)
			f.finish(0)
			f.drop(0, 0)
			if got := f.ask(t, 1, append(slices.Clone(text), tierInputs(7, 8)...)); got != c.stored {
				t.Errorf("%d rows were stored, want %d", got, c.stored)
			}
		})
	}
}
