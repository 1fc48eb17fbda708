package tiering

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// leastReaders is the least number of blocks read and checked at a time, whatever the number of cores: a disk wants more than
// one request to work on.
const leastReaders = 4

var errLate = errors.New("not read in time")

// readers opens blocks several at a time, each in a goroutine, so that a read that hangs in the kernel holds nobody. B is what
// an opened block is.
type readers[B interface{ close() }] struct {
	t      *Tiering
	busy   chan struct{}
	opened chan outcome[B]
	n      int // that have been begun
}

// outcome is what became of the block with number i.
type outcome[B any] struct {
	i     int
	block B
	err   error
}

// newReaders is for at most so many blocks.
func newReaders[B interface{ close() }](t *Tiering, most int) *readers[B] {
	return &readers[B]{
		t: t, busy: make(chan struct{}, max(leastReaders, workerCount())), opened: make(chan outcome[B], most),
	}
}

// begin has a block opened when a reader is free, for which it waits until the context's end. open lets go of what it has
// when it fails.
func (r *readers[B]) begin(ctx context.Context, open func() (B, error)) error {
	select {
	case r.busy <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	i := r.n
	r.n++
	go func() {
		o := outcome[B]{i: i, err: errors.New("panic while reading")}
		defer func() {
			if p := recover(); p != nil {
				o.err = fmt.Errorf("%w: %v", o.err, p)
			}
			<-r.busy
			r.opened <- o
		}()
		o.block, o.err = open()
	}()
	return nil
}

// collect waits for the blocks that were begun, but not beyond the context's end: those that are not there by then are late.
// They are closed in the background when they come; until then nothing else is fetched.
func (r *readers[B]) collect(ctx context.Context) (blocks []B, failed []error) {
	blocks = make([]B, r.n)
	failed = slices.Repeat([]error{errLate}, r.n)
	for got := range r.n {
		o, ok := next(ctx, r.opened)
		if !ok {
			r.t.late.Add(1)
			go func() {
				defer r.t.late.Add(-1)
				for range r.n - got {
					if late := <-r.opened; late.err == nil {
						late.block.close()
					}
				}
			}()
			break
		}
		blocks[o.i], failed[o.i] = o.block, o.err
	}
	return blocks, failed
}

// next waits for a block until the context's end. What has come by then is used, also when it is looked at later.
func next[B any](ctx context.Context, opened <-chan outcome[B]) (o outcome[B], ok bool) {
	select {
	case o = <-opened:
		return o, true
	default:
	}
	select {
	case o = <-opened:
		return o, true
	case <-ctx.Done():
		return o, false
	}
}
