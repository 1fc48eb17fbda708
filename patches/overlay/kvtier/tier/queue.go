package tier

import (
	"slices"
	"sync"
)

// queue holds the lineages that have something to store, each at most once.
type queue struct {
	mu      sync.Mutex
	cond    *sync.Cond
	waiting []*lineage
	active  bool
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

// take returns the next lineage; the one taken before counts as done.
func (q *queue) take() *lineage {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.active = false
	q.cond.Broadcast()
	for len(q.waiting) == 0 {
		q.cond.Wait()
	}
	l := q.waiting[0]
	q.waiting = slices.Delete(q.waiting, 0, 1)
	q.active = true
	return l
}

// drain waits until everything that was queued has been stored or given up.
func (q *queue) drain() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.active || len(q.waiting) > 0 {
		q.cond.Wait()
	}
}
