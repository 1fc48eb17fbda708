package kvtier

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// A window block holds rows of layers that keep only the last ones (sliding windows), and the cells they lay in: rows that are
// put elsewhere are summed in another order. It hangs on a block of the chain and has that block's rows from some row on, those
// before it having been dropped when it was stored. No prompt matches it by its tokens; who wants it names it.

// WindowBlock says which rows a window block has.
type WindowBlock struct {
	On       Key    // the block of the chain
	Child    int    // whose layers
	First    int    // row of that block which it begins with
	Position int    // of that row
	Tokens   []byte // of its rows
}

// Rows is how many rows it has.
func (w WindowBlock) Rows() int { return len(w.Tokens) / 4 }

// Key names it.
func (w WindowBlock) Key() Key { return BlockKey(w.On, w.Tokens, w.extras()) }

func (w WindowBlock) extras() []Extra {
	digest := sha256.New()
	writePrefixed(digest, []byte("kvt-window-1"))
	writeNumber(digest, w.Child)
	writeNumber(digest, w.First)
	return []Extra{{Row: 0, Digest: digest.Sum(nil)}}
}

func writeNumber(h hash.Hash, n int) {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], uint32(n))
	h.Write(b[:])
}

// place is the first position that its header has: where the next block of the chain begins.
func (w WindowBlock) place() int { return w.Position - w.First + BlockTokens }

// NewWindowLayout lays out K and V of every layer of a window block.
func NewWindowLayout(layers []Layer, rows int) *Layout {
	return newLayout(layers, rows, 64+5*rows) // its extra; its cells
}

// SealWindow is Seal for a window block, whose rows lay in cells.
func (l *Layout) SealWindow(file []byte, ns Namespace, w WindowBlock, cells []int32, dtype string) error {
	key, extra := w.Key(), w.extras()[0]
	h := &tierpb.BlockHeader{
		Namespace: ns[:], Key: key[:], Parent: w.On[:], FirstPosition: uint32(w.place()), Tokens: w.Tokens,
		Extras: []*tierpb.Extra{{Row: extra.Row, Digest: extra.Digest}},
	}
	for _, cell := range cells {
		h.Cells = append(h.Cells, uint32(cell))
	}
	return l.seal(file, dtype, h)
}

// MatchesWindow reports why the block is not the window block asked for, or nil; and the cells its rows lay in, of a cache
// that has so many.
func (b *Block) MatchesWindow(ns Namespace, w WindowBlock, layers []Layer, dtype string, size int) ([]int32, error) {
	h, key := b.Header, w.Key()
	if !bytes.Equal(h.Namespace, ns[:]) || !bytes.Equal(h.Key, key[:]) || int(h.FirstPosition) != w.place() {
		return nil, fmt.Errorf("%w: another block (key %x, position %d)", ErrCorrupt, h.Key, h.FirstPosition)
	}
	if len(h.Cells) != w.Rows() {
		return nil, fmt.Errorf("%w: %d cells of %d rows", ErrFormat, len(h.Cells), w.Rows())
	}
	cells := make([]int32, len(h.Cells))
	for i, cell := range h.Cells {
		if int(cell) >= size {
			return nil, fmt.Errorf("%w: cell %d of %d", ErrFormat, cell, size)
		}
		cells[i] = int32(cell)
	}
	return cells, b.has(layers, dtype)
}
