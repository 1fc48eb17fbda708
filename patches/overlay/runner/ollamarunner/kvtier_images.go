package ollamarunner

import (
	"reflect"

	"github.com/ollama/ollama/kvtier/tier"
	"github.com/ollama/ollama/model/input"
)

// In some models (M-RoPE: qwen2.5-vl, qwen3-vl, glm-ocr) a token after an image has not its index as position. Stock keeps
// these positions in the model, once for all requests: those of the prompt that was tokenised last. Where that one has images,
// every other request is computed at its positions, and gives rows that do not follow from its tokens. Such rows stay in
// memory, as in stock; they must not be stored.

// tierPositions says whose positions a model holds. Guarded by Server.mu.
type tierPositions struct {
	last       *input.Input // the first input of the prompt that was tokenised last
	lastImages bool         // that prompt has images
	strange    bool         // the positions may be others than the tokens' indices
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

// tierTokenised is called before the model arranges a prompt's inputs, and sets its positions.
func tierTokenised(s *Server, inputs []*input.Input) {
	t, host := tier.Active(), engineHost.Load()
	if t == nil || host == nil || !host.sharedPositions || len(inputs) == 0 {
		return
	}
	defer tier.Guard("tokenised")
	s.mu.Lock() // no batch is being built
	defer s.mu.Unlock()
	images := len(tierTokens(inputs)) != len(inputs)
	host.positions.last, host.positions.lastImages = inputs[0], images
	if !images {
		return
	}
	host.positions.strange = true
	for _, seq := range s.seqs {
		if seq != nil && seq.cache != nil {
			t.Doubt(seq.cache.Id, len(seq.cache.Inputs)+len(seq.pendingInputs))
		}
	}
}

// arranged is called when the model has arranged a prompt's inputs. After one without images every position is an index,
// unless another prompt has come meanwhile: then it is that one's turn to say so.
func (h *tierHost) arranged(inputs []*input.Input) {
	if !h.sharedPositions || len(inputs) == 0 {
		return
	}
	h.Lock()
	defer h.Unlock()
	if h.positions.last == inputs[0] && !h.positions.lastImages {
		h.positions.strange = false
	}
}
