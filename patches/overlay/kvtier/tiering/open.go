package tiering

import (
	"errors"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// fetchedBlock is a block that has been opened: its header is checked, and its rows too where they lie in private memory.
type fetchedBlock struct {
	key     kvtier.Key
	first   int
	rows    int // that match the prompt
	file    *kvtier.File
	block   *kvtier.Block
	private bool          // all of it is in memory that nobody else can write
	check   time.Duration // what its checksums took

	memory *memoryBound
	own    int // bytes of it that are taken for the block
}

// close gives the block's memory back.
func (b *fetchedBlock) close() {
	b.file.Close()
	b.memory.give(b.own)
	b.file, b.own = nil, 0
}

// openBlock opens or reads one block and checks everything about it before a byte of it is used; the rows of one in the RAM
// tier, which may still change, are checked when they are read.
func (t *Tiering) openBlock(
	b *fetchedBlock, r *tierpb.NamedFile, parent kvtier.Key, tokens []byte, extras []kvtier.Extra,
) (err error) {
	usable := false
	defer func() {
		if !usable { // a panic, too
			b.close()
		}
	}()
	if err = t.openFile(b, r); err != nil {
		return err
	}
	if b.block, err = b.file.Block(); err != nil {
		return err
	}
	err = b.block.Matches(t.namespace, b.key, parent, b.first, b.rows, tokens, extras, t.model.Layers, t.model.DType)
	if err != nil {
		return err
	}
	if b.private {
		start := time.Now()
		err = b.block.Verify()
		b.check = time.Since(start)
	}
	usable = err == nil
	return err
}

// openFile opens a block's file if it lies in memory, and reads it if it does not, or if too many are open.
func (t *Tiering) openFile(b *fetchedBlock, r *tierpb.NamedFile) (err error) {
	if r.Tier == tierpb.Tier_TIER_RAM {
		b.file, err = t.files.open(string(r.Path), int(r.FileBytes))
		if !errors.Is(err, kvtier.ErrManyOpen) {
			return err
		}
		if !t.memory.takeAll(int(r.FileBytes)) {
			return errMemory
		}
		b.own = int(r.FileBytes)
	}
	b.private = true
	b.file, err = t.files.read(string(r.Path), int(r.FileBytes))
	return err
}
