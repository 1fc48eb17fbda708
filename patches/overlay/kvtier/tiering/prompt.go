package tiering

import (
	"slices"

	"github.com/ollama/ollama/kvtier"
)

// Prompt is inputs as the store tells them from others: their tokens, and what stands at some of them beside a token.
type Prompt struct {
	Tokens []int32
	Extras []kvtier.Extra // rows are positions, in order
	Spans  []Span         // by their first positions
}

// Span is a run of positions that are computed in one batch, such as those of an image, with its first and its last. Nobody may
// resume between them: what is left would be computed in parts, or as if it were text.
type Span struct{ First, Last int }

// Text is a prompt of tokens alone.
func Text(tokens []int32) Prompt { return Prompt{Tokens: tokens} }

// Whole is the prompt up to its end, or up to a span that goes on after it.
func (p Prompt) Whole() Prompt {
	n := p.resumable(len(p.Tokens))
	return Prompt{
		Tokens: p.Tokens[:n],
		Extras: kvtier.ExtrasOf(p.Extras, 0, n),
		Spans:  slices.DeleteFunc(slices.Clone(p.Spans), func(s Span) bool { return s.First >= n }),
	}
}

// resumable is the last position up to the given one from which a runner may go on. Spans may overlap.
func (p Prompt) resumable(at int) int {
	for _, s := range slices.Backward(p.Spans) {
		if s.First < at && at <= s.Last {
			at = s.First
		}
	}
	return at
}
