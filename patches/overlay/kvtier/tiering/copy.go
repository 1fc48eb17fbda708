package tiering

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// gatherBytes is how much is gathered for one write into memory that the CPU can't access: each takes a call of the
// driver.
const gatherBytes = 4 << 20

// rowCopy copies fetched rows into cells that belong to nobody yet, under the Host's lock, after BeforeRestore: nobody reads
// those cells until the lock is released.
//
// The file of a block in the RAM tier may be changed by others at any time. Where rows lie in memory in one piece they are
// read from it into their cells, and checked there: the bytes are walked once, and what is checked is what stays. What is
// not right is cleared at once, also in cells that are not marked afterwards: a masked cell is still multiplied, and NaN times
// zero is NaN. Other rows are read into a buffer, checked there and then written. A block read from a disk is private memory
// that has been checked.
type rowCopy struct {
	t       *Tiering
	f       *fetch
	from    int // position of the first of cells
	cells   []int32
	buffers chan []byte  // one for each goroutine
	checked atomic.Int64 // nanoseconds of reading with checksums, over all goroutines

	mu     sync.Mutex
	good   int   // number of the first damaged block
	damage error // of that block
}

// copyIn copies the rows from position from on into cells, segments shared out over a few goroutines. It returns how many
// of them, from the first on, are there in all layers: all, or those before the first block that can't be used, and why it
// can't. An error says that none can be used.
func (t *Tiering) copyIn(f *fetch, from int, cells []int32) (rows int, cut tierpb.Shortfall, err error) {
	c := &rowCopy{t: t, f: f, from: from, cells: cells, good: len(f.blocks)}
	workers := workerCount()
	c.buffers = t.readInto(workers, c.bufferBytes())
	if err := parallel(workers, 2*len(t.model.Layers), c.segments); err != nil {
		return 0, restoreFailed, err
	}
	f.report.VerifySeconds += time.Duration(c.checked.Load()).Seconds()
	if c.damage == nil {
		return len(cells), unexplained, nil
	}
	b := f.blocks[c.good]
	slog.Warn("kv block not usable, recomputing from there", "first", b.first, "error", c.damage)
	t.reportDamage(b.key, c.damage)
	return max(0, b.first-from), blockReason(c.damage), nil
}

// bufferBytes is the size of the largest segment, more for memory that the CPU can't access.
func (c *rowCopy) bufferBytes() (n int) {
	if !c.t.model.OnHost {
		n = gatherBytes
	}
	for i := range c.f.blocks {
		for _, s := range c.f.blocks[i].block.Header.Segments {
			n = max(n, int(s.StoredBytes))
		}
	}
	return n
}

// readInto returns so many buffers of at least so many bytes. Those that a device copies from stay for the next restore: to make
// one takes the driver a millisecond and more. The caller holds the Host's lock.
func (t *Tiering) readInto(n, bytes int) chan []byte {
	if !t.model.OnHost && t.model.Pinned != nil && bytes <= gatherBytes {
		for len(t.pinned) < n {
			pinned := t.model.Pinned(gatherBytes)
			if pinned == nil {
				break
			}
			t.pinned = append(t.pinned, pinned)
		}
	}
	buffers := make(chan []byte, n)
	for i := range n {
		if bytes <= gatherBytes && i < len(t.pinned) {
			buffers <- t.pinned[i]
		} else {
			buffers <- make([]byte, bytes)
		}
	}
	return buffers
}

// segments copies segment i of all blocks before the first damaged one.
func (c *rowCopy) segments(i int) {
	buffer := <-c.buffers
	defer func() { c.buffers <- buffer }()
	for at := 0; at < c.undamaged(); {
		if c.readIn(i, at, buffer) {
			at++
			continue
		}
		chunk, n := c.gather(i, at, buffer)
		if n == 0 {
			return
		}
		c.t.rows.Write(i, c.cells, chunk)
		at += n
	}
}

// wanted returns which rows of a block are wanted: [skip, end).
func (c *rowCopy) wanted(b *fetchedBlock) (skip, end int) {
	return max(0, c.from-b.first), min(b.rows, c.from+len(c.cells)-b.first)
}

// readIn reads the wanted rows of segment i of a block from its file into their cells, and checks them there. false: they
// go another way.
func (c *rowCopy) readIn(i, number int, buffer []byte) bool {
	b := c.f.blocks[number]
	skip, end := c.wanted(b)
	if b.private || end <= skip {
		return false
	}
	at := b.first + skip - c.from
	cells := c.t.rows.Memory(i, c.cells[at:at+end-skip])
	if cells == nil {
		return false
	}
	segment := b.block.Header.Segments[i]
	before, after := skip*int(segment.RowBytes), end*int(segment.RowBytes)
	parts := append([][]byte{buffer[:before]}, cells...) // the checksum is that of all rows, wanted or not
	parts = append(parts, buffer[before:before+int(segment.StoredBytes)-after])
	right := false
	defer func() { // whatever happens
		if !right {
			for _, rows := range cells {
				clear(rows)
			}
		}
	}()
	err := c.load(parts, b, i)
	if right = err == nil; !right {
		c.damaged(number, err)
	}
	return true
}

// gather returns the wanted rows of segment i of n blocks from number at on, checked: of one block for memory that the CPU
// can access, of as many as the buffer holds for other memory. n is 0 when no undamaged block is left.
func (c *rowCopy) gather(i, at int, buffer []byte) (chunk rows.Chunk, n int) {
	filled := 0
	for ; at+n < c.undamaged(); n++ {
		b := c.f.blocks[at+n]
		skip, end := c.wanted(b)
		if end <= skip {
			continue
		}
		segment := b.block.Header.Segments[i]
		bytes, rowBytes := int(segment.StoredBytes), int(segment.RowBytes)
		if filled > 0 && (c.t.model.OnHost || filled+bytes > len(buffer)) {
			break
		}
		if filled == 0 {
			chunk.Start = b.first + skip - c.from
		}
		if b.private && c.t.model.OnHost {
			chunk.Data = b.block.Segment(i)[skip*rowBytes : end*rowBytes]
			return chunk, n + 1
		}
		if b.private {
			copy(buffer[filled:], b.block.Segment(i))
		} else if err := c.load([][]byte{buffer[filled : filled+bytes]}, b, i); err != nil {
			c.damaged(at+n, err)
			break
		}
		filled += copy(buffer[filled:], buffer[filled+skip*rowBytes:filled+end*rowBytes])
	}
	chunk.Data = buffer[:filled]
	return chunk, n
}

// load reads a segment of an open file into parts and checks it there.
func (c *rowCopy) load(parts [][]byte, b *fetchedBlock, i int) error {
	start := time.Now()
	defer func() { c.checked.Add(int64(time.Since(start))) }()
	return b.block.ReadSegment(parts, i)
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
