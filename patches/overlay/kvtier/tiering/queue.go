package tiering

import (
	"slices"
	"sync"
)

// queue holds the lineages that have something to store, each at most once.
type queue struct {
	mu      sync.Mutex
	cond    *sync.Cond
	waiting []*lineage
	current *lineage // taken, and not yet done
}

func newQueue() *queue {
	q := &queue{}
	q.cond = sync.NewCond(&q.mu)
	return q
}

func (q *queue) add(l *lineage) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !slices.Contains(q.waiting, l) {
		q.waiting = append(q.waiting, l)
		q.cond.Broadcast()
	}
}

// take returns the next lineage. Who takes it says when it is done.
func (q *queue) take() *lineage {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.waiting) == 0 {
		q.cond.Wait()
	}
	q.current = q.waiting[0]
	q.waiting = slices.Delete(q.waiting, 0, 1)
	return q.current
}

// done says that what was taken has been stored or given up.
func (q *queue) done() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.current = nil
	q.cond.Broadcast()
}

// length is how many lineages wait or are at work.
func (q *queue) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(q.waiting)
	if q.current != nil && !slices.Contains(q.waiting, q.current) {
		n++
	}
	return n
}

// drain waits until everything that was queued has been stored or given up.
func (q *queue) drain() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.current != nil || len(q.waiting) > 0 {
		q.cond.Wait()
	}
}
