package tier

import (
	"bytes"
	"context"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// found is what of a prompt is stored.
type found struct {
	blocks []*tierpb.BlockInfo // from the first on
	chain  []kvtier.Key        // of its whole blocks; where rows name them, those that are stored
	links  []*link             // of chain, where rows name it
	held   int                 // rows in memory that the blocks go on from
}

// find asks the sidecar for the blocks of a prompt, of which a slot holds some rows.
func (t *Tier) find(ctx context.Context, p Prompt, tokens []byte, slot, memory int, timeout time.Duration) (found, error) {
	if t.model.ByRows {
		return t.findHistory(ctx, p, tokens, slot, memory, timeout)
	}
	chain := kvtier.Chain(t.namespace, tokens, p.Extras)
	has, err := t.client.Has(ctx, t.namespace, chain, tokens, timeout)
	if err != nil {
		return found{}, err
	}
	return found{blocks: p.matched(has.Blocks, t.namespace, chain), chain: chain, held: memory}, nil
}

// findHistory is find where rows name the blocks. Those that the slot holds are gone on from only as far as they are, bit by bit,
// those of the history that was found; the others of the slot's rows are replaced.
func (t *Tier) findHistory(ctx context.Context, p Prompt, tokens []byte, slot, memory int, timeout time.Duration) (found, error) {
	held := t.fingerprints(slot, memory)
	has, err := t.client.HasHistory(ctx, t.namespace, tokens, p.Extras, held, memory+t.config.MinTokens, timeout)
	if err != nil {
		return found{}, err
	}
	f := found{}
	for i, b := range has.Blocks {
		first := i * kvtier.BlockTokens
		if int(b.Rows) < kvtier.BlockTokens || len(tokens) < 4*(first+kvtier.BlockTokens) {
			break
		}
		k := &link{
			first: first, rows: kvtier.BlockTokens, fingerprint: b.Fingerprint,
			tokens: tokens[4*first : 4*(first+kvtier.BlockTokens)], extras: kvtier.ExtrasOf(p.Extras, first, kvtier.BlockTokens),
		}
		if i > 0 {
			k.before = f.links[i-1]
		}
		if !k.name(t) || !bytes.Equal(k.key[:], b.Key) {
			has.Blocks = has.Blocks[:i] // no answer joins what does not hang together
			break
		}
		f.links, f.chain = append(f.links, k), append(f.chain, k.key)
	}
	f.blocks = p.matched(has.Blocks, t.namespace, f.chain)
	for i, fingerprint := range held {
		if i >= len(f.links) || !bytes.Equal(f.links[i].fingerprint, fingerprint) {
			break
		}
		f.held = (i + 1) * kvtier.BlockTokens
	}
	return f, nil
}
