package tiering

import (
	"bytes"
	"slices"

	"github.com/ollama/ollama/kvtier"
)

// link is a block of a content: of the chain, or its tail. Where tokens do not decide the bits of its rows, its key has a
// fingerprint of them: histories of one text are never joined. Guarded by the Host's lock.
type link struct {
	before      *link // nil: it is the first
	first, rows int
	tokens      []byte
	extras      []kvtier.Extra
	fingerprint []byte // nil: not known, or of no use
	key         kvtier.Key
	named       bool
}

// known reports whether it is known which rows it has, and those before it: what the sidecar must know to name it.
func (k *link) known(t *Tiering) bool {
	return !t.model.ByRows || k.fingerprint != nil && (k.before == nil || k.before.known(t))
}

// name finds the key, if it can be known yet.
func (k *link) name(t *Tiering) bool {
	switch {
	case k.named:
		return true
	case k.before != nil && !k.before.name(t):
		return false
	case t.model.ByRows && k.fingerprint == nil:
		return false
	}
	k.key, k.named = kvtier.BlockKey(k.parent(t), k.tokens, k.extras, k.fingerprint), true
	return true
}

// parent is what it hangs on, which has a name.
func (k *link) parent(t *Tiering) kvtier.Key {
	if k.before == nil {
		return t.namespace
	}
	return k.before.key
}

// same reports whether another content has the same text there.
func (k *link) same(of *link) bool {
	return bytes.Equal(k.tokens, of.tokens) && slices.EqualFunc(k.extras, of.extras, func(a, b kvtier.Extra) bool {
		return a.Row == b.Row && bytes.Equal(a.Digest, b.Digest)
	})
}

// links are the blocks whose rows the slot holds whole, as far as they are known: of its content, or of the one before.
func (ts *slot) links(rows int) []*link {
	links := ts.kept
	if chain := ts.lineage.chain; len(chain) > len(links) {
		links = chain
	}
	return links[:min(len(links), rows/kvtier.BlockTokens)]
}

// heldBlocks are those that a slot holds whole of so many rows, up to the first of which it is not known which rows it has.
func (t *Tiering) heldBlocks(slot, rows int) []*link {
	if !t.model.ByRows {
		return nil
	}
	t.host.Lock()
	defer t.host.Unlock()
	links := t.slots[slot].links(rows)
	known := 0
	for known < len(links) && links[known].name(t) {
		known++
	}
	return links[:known:known]
}

// begins reports whether the slot holds the rows of the first of these blocks, bit by bit.
func (ts *slot) begins(with []*link) bool {
	held := ts.links(len(with) * kvtier.BlockTokens)
	return len(held) == len(with) && slices.EqualFunc(held, with, func(a, b *link) bool {
		return a.fingerprint != nil && bytes.Equal(a.fingerprint, b.fingerprint)
	})
}
