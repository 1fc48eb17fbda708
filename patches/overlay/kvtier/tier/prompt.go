package tier

import (
	"bytes"
	"slices"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
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

// matched are the blocks of a look-up as far as they match the prompt, whose whole blocks are in chain. One that is not among
// those was matched by its tokens, up to what stands beside them, and that says nothing of what the prompt has there. Where the
// prompt has all of its tokens its key says more.
func (p Prompt) matched(blocks []*tierpb.BlockInfo, ns kvtier.Namespace, chain []kvtier.Key) []*tierpb.BlockInfo {
	for i, b := range blocks {
		if i < len(chain) && bytes.Equal(b.Key, chain[i][:]) {
			continue
		}
		first, parent := i*kvtier.BlockTokens, ns
		if i > 0 {
			parent = chain[i-1]
		}
		if rows := int(b.BlockRows); len(p.Extras) > 0 && first+rows <= len(p.Tokens) {
			tokens := kvtier.TokenBytes(p.Tokens[first : first+rows])
			if key := kvtier.RowsKey(parent, tokens, kvtier.ExtrasOf(p.Extras, first, rows), b.Fingerprint); bytes.Equal(b.Key, key[:]) {
				b.Rows = b.BlockRows
				continue
			}
		}
		inside := kvtier.ExtrasOf(p.Extras, first, int(b.Rows))
		switch {
		case len(inside) == 0:
			continue
		case inside[0].Row == 0:
			return blocks[:i]
		}
		b.Rows = inside[0].Row
		return blocks[:i+1]
	}
	return blocks
}
