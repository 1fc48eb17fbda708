package kvtier

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
)

// A window is the rows of layers that keep only the last ones (sliding windows), as they were when a content ended. It is
// stored in window blocks, with the cells the rows lay in: rows that are put elsewhere are summed in another order. Each hangs on
// a block of the chain and has that block's rows from some row on, those before it having been dropped. No prompt matches one
// by its tokens. The last is named by what it hangs on; it names the others, which are named by their cells, too, so that windows
// which share rows in the same cells share blocks, and others do not.

// WindowBlock is one block of a window.
type WindowBlock struct {
	On       Key     // the block of the chain
	Child    int     // whose layers
	First    int     // row of that block which it begins with
	Position int     // of that row
	Tokens   []byte  // of its rows
	Cells    []int32 // of its rows; of one that is sought nil
	Last     bool    // the window ends with it
	Others   []Key   // of the last one: the blocks before it, first to last
}

// Rows is how many rows it has.
func (w WindowBlock) Rows() int { return len(w.Tokens) / 4 }

// Key names it. That of the last block does not depend on cells.
func (w WindowBlock) Key() Key { return BlockKey(w.On, w.Tokens, w.Extras(), nil) }

// Extras are what its key has beside the tokens.
func (w WindowBlock) Extras() []Extra {
	digest := sha256.New()
	if w.Last {
		writePrefixed(digest, []byte("kvt-window-end-1"))
	} else {
		writePrefixed(digest, []byte("kvt-window-1"))
	}
	writeNumber(digest, w.Child)
	writeNumber(digest, w.First)
	if !w.Last {
		for _, cell := range w.Cells {
			writeNumber(digest, int(cell))
		}
	}
	return []Extra{{Row: 0, Digest: digest.Sum(nil)}}
}

func writeNumber(h hash.Hash, n int) {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], uint32(n))
	h.Write(b[:])
}

// place is the first position that its header has: where the next block of the chain begins.
func (w WindowBlock) place() int { return w.Position - w.First + BlockTokens }

// WindowOf returns w, which was sought by key, with what the block says of its cells and, of a last one, of the others; or why it
// is another block. size is how many cells the cache has.
func (b *Block) WindowOf(ns Namespace, w WindowBlock, key Key, layers []Layer, dtype string, size int) (WindowBlock, error) {
	h := b.Header
	if len(h.Cells) != w.Rows() {
		return w, fmt.Errorf("%w: %d cells of %d rows", ErrFormat, len(h.Cells), w.Rows())
	}
	w.Cells = make([]int32, len(h.Cells))
	for i, cell := range h.Cells {
		if int(cell) >= size {
			return w, fmt.Errorf("%w: cell %d of %d", ErrFormat, cell, size)
		}
		w.Cells[i] = int32(cell)
	}
	if !bytes.Equal(h.Namespace, ns[:]) || !bytes.Equal(h.Key, key[:]) || w.Key() != key || int(h.FirstPosition) != w.place() {
		return w, fmt.Errorf("%w: another block (key %x, position %d)", ErrCorrupt, h.Key, h.FirstPosition)
	}
	for _, other := range h.Window {
		if len(other) != len(Key{}) {
			return w, fmt.Errorf("%w: a key of %d bytes", ErrFormat, len(other))
		}
		w.Others = append(w.Others, Key(other))
	}
	return w, b.has(layers, dtype)
}
