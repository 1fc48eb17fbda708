package tiering

import (
	"sync"

	"github.com/ollama/ollama/kvtier/rows"
)

// Host is what the tiering asks of a runner.
type Host interface {
	// Locker is the runner's lock. Rows, and which cells hold what, are used only under it; it is the outermost one.
	sync.Locker

	// Quiesce waits until everything that was launched is complete. The caller holds the lock, so nothing can be launched
	// before it is released.
	Quiesce()

	// BeforeRestore waits until what is not yet computed writes no cell that is free now, other than those that Avoid
	// returns. The caller holds the lock. A runner without run-ahead quiesces.
	BeforeRestore()

	RunAhead
}

// RunAhead says what a runner has launched, or built to be launched, and not yet computed. NoRunAhead is that of a runner
// that holds its lock from building a batch until its rows are complete.
type RunAhead interface {
	// Running returns the batches that are being computed.
	Running() []int

	// Wait returns when none of the batches is being computed. With or without the lock.
	Wait(batches []int)

	// AwaitBuilt waits, for a bounded time and without the lock, for what has been built and not yet been computed. A request
	// calls it that is about to restore.
	AwaitBuilt()

	// Ahead is how many rows the batches compute that are built and not yet computed.
	Ahead() int

	// Avoid returns the free cells that a restore must not use: a batch that is built will write them. Under the lock.
	Avoid() map[int32]struct{}

	// AvoidWindow is Avoid for the cells of a window's cache.
	AvoidWindow(child int) map[int32]struct{}
}

// NoRunAhead is for embedding in the Host of a runner that never runs ahead.
type NoRunAhead struct{}

func (NoRunAhead) Running() []int { return nil }

func (NoRunAhead) Wait([]int) {}

func (NoRunAhead) AwaitBuilt() {}

func (NoRunAhead) Ahead() int { return 0 }

func (NoRunAhead) Avoid() map[int32]struct{} { return nil }

func (NoRunAhead) AvoidWindow(int) map[int32]struct{} { return nil }

// Rows are the cells of a runner's cache and the rows in them. Segments are numbered as in a block: K and V of the model's
// first layer, of its second, … Everything is called under the Host's lock.
type Rows interface {
	// Cells returns the cell of every position of a slot in [from, to), or nil if one is missing or held twice.
	Cells(slot, from, to int) []int32

	// Find returns the cells where the runner itself would put the slot's next n positions from from on, as many as there
	// are, none of which is in avoid. They stay free.
	Find(slot, from, n int, avoid map[int32]struct{}) []int32

	// Read copies the rows of cells into dst, one after the other.
	Read(segment int, cells []int32, dst []byte)

	// Write writes the rows of a chunk into cells; for different segments at the same time.
	Write(segment int, cells []int32, chunk rows.Chunk)

	// Memory returns where the rows of cells lie, in their order, in pieces of whole rows. nil where the CPU can't access them,
	// or a row is not in one piece.
	Memory(segment int, cells []int32) [][]byte

	// Occupy gives cells to a slot: cells[i] holds position from+i. Their rows have been written.
	Occupy(slot, from int, cells []int32)

	// Drop takes the slot's positions from from on away.
	Drop(slot, from int)
}

// Witness is a Host that is told which rows were copied out of which cells: position first's and those after it. The one
// there is belongs to a build for tests.
type Witness interface {
	Exported(first int, cells []int32)
}
