package tier

import (
	"errors"
	"runtime/debug"
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
	private bool          // nobody else can write its memory
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

// openBlock maps or reads one block and checks everything about it before a byte of it is used; the rows of a mapped one,
// which may still change, are checked when they are copied.
func (t *Tier) openBlock(
	b *fetchedBlock, r *tierpb.GetResponse, parent kvtier.Key, tokens []byte, extras []kvtier.Extra,
) (err error) {
	// A mapped file that somebody truncates faults; that must be a miss, not the end of the runner.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = errors.Join(kvtier.ErrCorrupt, errors.New("fault while reading"))
		}
		if err != nil {
			b.close()
		}
	}()
	open := kvtier.ReadFile
	if r.Tier == tierpb.Tier_TIER_RAM {
		open = kvtier.MapForRead
	} else {
		b.private = true
	}
	if b.file, err = open(r.Path, int(r.FileBytes)); err != nil {
		return err
	}
	if b.block, err = kvtier.Open(b.file.Data); err != nil {
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
	return err
}
