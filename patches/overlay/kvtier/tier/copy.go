package tier

import (
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
)

// gatherBytes is how much is gathered for one write into memory that the CPU can't access: each takes a call of the
// driver.
const gatherBytes = 4 << 20

// rowCopy copies fetched rows into cells that belong to nobody yet, under the Host's lock.
//
// A mapped block may be changed by others at any time. Each of its segments is copied to private memory, checked there,
// and only then written: no damaged byte reaches a cell, not even one that is not marked afterwards, since a masked cell is
// still multiplied and NaN times zero is NaN. A block read from a disk is private memory that has been checked.
type rowCopy struct {
	t       *Tier
	f       *fetch
	from    int // position of the first of cells
	cells   []int32
	buffers sync.Pool    // *[]byte, one for each goroutine
	checked atomic.Int64 // nanoseconds of copying with checksums, over all goroutines

	mu     sync.Mutex
	good   int   // number of the first damaged block
	damage error // of that block
}

// copyIn copies the rows from position from on into cells, segments shared out over a few goroutines. It returns how many
// of them, from the first on, are there in all layers: all, or those before the first damaged block. An error says that
// none can be used.
func (t *Tier) copyIn(f *fetch, from int, cells []int32) (rows int, err error) {
	c := &rowCopy{t: t, f: f, from: from, cells: cells, good: len(f.blocks)}
	size := c.bufferBytes()
	c.buffers.New = func() any { b := make([]byte, size); return &b }
	if err := parallel(workerCount(), 2*len(t.model.Layers), c.segments); err != nil {
		return 0, err
	}
	f.report.VerifySeconds += time.Duration(c.checked.Load()).Seconds()
	if c.damage == nil {
		return len(cells), nil
	}
	b := &f.blocks[c.good]
	slog.Warn("kv block not usable, recomputing from there", "first", b.first, "error", c.damage)
	t.reportDamage(b.key, c.damage)
	return max(0, b.first-from), nil
}

// bufferBytes is the size of the largest segment, more for memory that the CPU can't access.
func (c *rowCopy) bufferBytes() (n int) {
	if !c.t.model.OnHost {
		n = gatherBytes
	}
	for i := range c.f.blocks {
		for s := range c.f.blocks[i].block.Header.Segments {
			n = max(n, len(c.f.blocks[i].block.Segment(s)))
		}
	}
	return n
}

// segments copies segment i of all blocks before the first damaged one.
func (c *rowCopy) segments(i int) {
	buffer := c.buffers.Get().(*[]byte)
	defer c.buffers.Put(buffer)
	for at := 0; ; {
		chunk, n := c.gather(i, at, *buffer)
		if n == 0 {
			return
		}
		c.t.rows.Write(i, c.cells, chunk)
		at += n
	}
}

// gather returns the wanted rows of segment i of n blocks from number at on, checked: of one block for memory that the CPU
// can access, of as many as the buffer holds for other memory. n is 0 when no undamaged block is left.
func (c *rowCopy) gather(i, at int, buffer []byte) (chunk rows.Chunk, n int) {
	filled := 0
	for ; at+n < c.undamaged(); n++ {
		b := &c.f.blocks[at+n]
		skip, end := max(0, c.from-b.first), min(b.rows, c.from+len(c.cells)-b.first)
		if end <= skip {
			continue
		}
		segment, rowBytes := b.block.Segment(i), int(b.block.Header.Segments[i].RowBytes)
		if filled > 0 && (c.t.model.OnHost || filled+len(segment) > len(buffer)) {
			break
		}
		if filled == 0 {
			chunk.Start = b.first + skip - c.from
		}
		if b.private && c.t.model.OnHost {
			chunk.Data = segment[skip*rowBytes : end*rowBytes]
			return chunk, n + 1
		}
		if err := c.load(buffer[filled:], b, i); err != nil {
			c.damaged(at+n, err)
			break
		}
		filled += copy(buffer[filled:], buffer[filled+skip*rowBytes:filled+end*rowBytes])
	}
	chunk.Data = buffer[:filled]
	return chunk, n
}

// load copies a segment to the beginning of dst and checks the copy. A fault in a mapped file that was cut short is damage.
func (c *rowCopy) load(dst []byte, b *fetchedBlock, i int) (err error) {
	if b.private {
		copy(dst, b.block.Segment(i))
		return nil
	}
	start := time.Now()
	defer func() {
		c.checked.Add(int64(time.Since(start)))
		if p := recover(); p != nil {
			if _, fault := p.(interface{ Addr() uintptr }); !fault {
				panic(p)
			}
			err = fmt.Errorf("%w: fault while copying", kvtier.ErrCorrupt)
		}
	}()
	return b.block.CopySegment(dst, i)
}

func (c *rowCopy) undamaged() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.good
}

func (c *rowCopy) damaged(block int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if block < c.good {
		c.good, c.damage = block, err
	}
}
