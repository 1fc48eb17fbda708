package tiering

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/ollama/ollama/kvtier"
)

const (
	// memoryShare is the part, one in so many, of the memory still available that all restores together may hold.
	memoryShare = 2

	// memoryWaitShare is the part of the time that the files may take which may pass until others have given memory back.
	memoryWaitShare = 2
)

// memoryBound bounds what blocks read from a disk hold until they are copied into cells, over all requests of the runner.
// Blocks of the RAM tier lie in memory already and take none of it. The zero value is ready.
type memoryBound struct {
	available func() int // bytes; nil: what the machine says

	mu    sync.Mutex
	held  int           // bytes
	freed chan struct{} // closed when some are given back; nil when nobody waits
}

// take returns how many of the wanted bytes the caller may hold, until it gives them back. When there are fewer because
// others hold some, it waits for those, at most for the given time.
func (m *memoryBound) take(ctx context.Context, want int, wait time.Duration) int {
	if want <= 0 {
		return 0
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for last := wait <= 0; ; {
		available := m.measure() // reads files: not while anybody waits for the lock
		taken, freed := m.try(want, available, last)
		if freed == nil {
			return taken
		}
		select {
		case <-freed:
		case <-timer.C:
			last = true
		case <-ctx.Done():
			last = true
		}
	}
}

// takeAll takes so many bytes, or none where there are fewer just then.
func (m *memoryBound) takeAll(want int) bool {
	taken := m.take(context.Background(), want, 0)
	if taken < want {
		m.give(taken)
		return false
	}
	return true
}

// try takes all that is wanted, or what there is if this is the last attempt or nobody else holds any; else it returns
// what to wait for.
func (m *memoryBound) try(want, available int, last bool) (taken int, freed <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	free := max(available/memoryShare-m.held, 0)
	if free >= want || last || m.held == 0 {
		taken = min(want, free)
		m.held += taken
		return taken, nil
	}
	if m.freed == nil {
		m.freed = make(chan struct{})
	}
	return 0, m.freed
}

// give gives back bytes that were taken, once the memory has gone back to the system.
func (m *memoryBound) give(n int) {
	if n <= 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held -= n
	if m.freed != nil {
		close(m.freed)
		m.freed = nil
	}
}

// free is how many bytes may be held beside what restores hold.
func (m *memoryBound) free() int {
	available := m.measure()
	m.mu.Lock()
	defer m.mu.Unlock()
	return max(available/memoryShare-m.held, 0)
}

func (m *memoryBound) measure() int {
	if m.available != nil {
		return m.available()
	}
	return kvtier.AvailableMemory()
}

// shortOfMemory says that rows which are stored are computed again because there is no memory to read them into.
func (t *Tiering) shortOfMemory(stored, fit int) {
	if fit >= stored {
		return
	}
	t.stats.shortOfMemory(stored - fit)
	t.memory.mu.Lock()
	held := t.memory.held
	t.memory.mu.Unlock()
	slog.Warn("kv restore cut short, computing the rest: too little memory to read all that is stored",
		"restored_at_most", fit, "stored", stored, "held_bytes", held, "available_bytes", t.memory.measure())
}
