package tiering

import (
	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// putOpen says what the blocks of this model are made of: the sidecar names them, and writes their headers.
func (t *Tiering) putOpen() *tierpb.PutOpen {
	open := &tierpb.PutOpen{
		Namespace: t.namespace[:], Description: t.model.Description, BlockTokens: kvtier.BlockTokens,
		Segments: kvtier.SegmentsOf(t.model.Layers, t.model.DType),
	}
	for _, w := range t.model.Windows {
		open.Segments = append(open.Segments, kvtier.SegmentsOf(w.Layers, w.DType)...)
		open.WindowChildren = append(open.WindowChildren, uint32(w.Child))
	}
	return open
}

// textOf describes the first of the blocks, as many as are of one text, and returns how many these are: at least one.
func (t *Tiering) textOf(blocks []*block) (text *tierpb.PutText, n int) {
	t.host.Lock()
	defer t.host.Unlock()
	text = &tierpb.PutText{}
	chain := blocks[0].link.chain()
	for _, b := range blocks {
		at := b.link.first / kvtier.BlockTokens
		if at == len(chain) && chain[at-1] == b.link.before {
			chain = append(chain, b.link)
		}
		if at >= len(chain) || chain[at] != b.link {
			break // it is of another text
		}
		text.Blocks = append(text.Blocks, b.described())
	}
	for _, k := range chain {
		text.Tokens = append(text.Tokens, k.tokens...)
		for _, x := range k.extras {
			text.Extras = append(text.Extras, &tierpb.Extra{Row: uint32(k.first) + x.Row, Digest: x.Digest})
		}
		if t.model.ByRows {
			text.Fingerprints = append(text.Fingerprints, k.fingerprint)
		}
	}
	return text, len(text.Blocks)
}

// chain are the links from the first one to this.
func (k *link) chain() []*link {
	chain := make([]*link, k.first/kvtier.BlockTokens+1)
	for at := len(chain) - 1; k != nil; at, k = at-1, k.before {
		chain[at] = k
	}
	return chain
}

// described is what the sidecar must know to name it.
func (b *block) described() *tierpb.TextBlock {
	if b.part == nil {
		return &tierpb.TextBlock{FirstRow: uint32(b.first), Rows: uint32(b.rows)}
	}
	w := b.part.block
	text := &tierpb.TextBlock{
		FirstRow: uint32(w.Position), Rows: uint32(b.rows), Child: uint32(w.Child), EndsWindow: w.Last,
	}
	for _, of := range append(b.others[:len(b.others):len(b.others)], b) {
		for _, cell := range of.part.block.Cells {
			text.Cells = append(text.Cells, uint32(cell))
		}
	}
	return text
}
