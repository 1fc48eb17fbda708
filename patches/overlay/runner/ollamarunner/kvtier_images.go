package ollamarunner

import (
	"reflect"

	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/model/input"
)

// In some models (M-RoPE: qwen2.5-vl, qwen3-vl, glm-ocr) a token after an image has not its index as position. Stock keeps
// these positions in the model, once for all requests: those of the prompt that was tokenised last. Where that one has images,
// every other request is computed at its positions, and gives rows that do not follow from its tokens. Such rows stay in
// memory, as in stock; they must not be stored.

// tierPositions says whose positions a model holds. Guarded by Server.mu.
type tierPositions struct {
	strange  bool // they may be others than the tokens' indices
	images   int  // prompts with images that have come
	arranged int  // of those, how many the model has arranged
}

// tierSharesPositions reports whether a model keeps positions of a prompt beyond its request.
func tierSharesPositions(model any) bool {
	t := reflect.TypeOf(model)
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil || t.Kind() != reflect.Struct {
		return false
	}
	_, found := t.FieldByName("positionCache")
	return found
}

// tierTokenised is called before the model arranges a prompt's inputs, which sets its positions, and what it returns afterwards.
// After a prompt without images every position is an index, unless one with images has been arranged meanwhile: the two may
// have written between each other's.
func tierTokenised(s *Server, inputs []*input.Input) (arranged func()) {
	t, host := tiering.Active(), engineHost.Load()
	if t == nil || host == nil || !host.sharedPositions {
		return func() {}
	}
	defer tiering.Guard("tokenised")
	s.mu.Lock() // no batch is being built
	defer s.mu.Unlock()
	p, images := &host.positions, len(tierTokens(inputs)) != len(inputs)
	if images {
		p.images++
		p.strange = true
		for _, seq := range s.seqs {
			if seq != nil && seq.cache != nil {
				t.Doubt(seq.cache.Id, len(seq.cache.Inputs)+len(seq.pendingInputs))
			}
		}
	}
	alone, before := p.images == p.arranged, p.images
	return func() {
		defer tiering.Guard("arranged")
		s.mu.Lock()
		defer s.mu.Unlock()
		if images {
			p.arranged++
		} else if alone && p.images == before {
			p.strange = false
		}
	}
}
