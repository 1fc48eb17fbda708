package tiering

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

func TestMemoryIsAShareOfWhatIsAvailable(t *testing.T) {
	m := &memoryBound{available: func() int { return 4000 }}
	ctx := t.Context()
	if got := m.take(ctx, 0, time.Hour); got != 0 {
		t.Errorf("took %d of none", got)
	}
	if got := m.take(ctx, 5000, time.Hour); got != 2000 { // nobody else holds any: there is nothing to wait for
		t.Errorf("took %d of half of 4000", got)
	}
	if got := m.take(ctx, 1, 0); got != 0 { // none of it has been used yet: it counts all the same
		t.Errorf("took %d of nothing", got)
	}
	m.available = func() int { return 2000 }
	m.give(1200)
	if got := m.take(ctx, 500, 0); got != 200 || m.held != 1000 {
		t.Errorf("took %d, %d are held: half of 2000 may be", got, m.held)
	}
	m.available = func() int { return 0 } // others use the machine
	m.give(600)
	if got := m.take(ctx, 500, 0); got != 0 || m.held != 400 {
		t.Errorf("took %d although nothing is left, %d are held", got, m.held)
	}
	m.give(400)
	if m.held != 0 {
		t.Errorf("%d held by nobody", m.held)
	}
}

func TestMemoryIsWaitedForAndNotLongerThanAllowed(t *testing.T) {
	m := &memoryBound{available: func() int { return 4000 }}
	m.held = 1900
	start := time.Now()
	if got := m.take(t.Context(), 500, 50*time.Millisecond); got != 100 {
		t.Errorf("took %d, 100 are left of 4000 / 2", got)
	}
	if took := time.Since(start); took < 50*time.Millisecond || took > 5*time.Second {
		t.Errorf("waited %v", took)
	}
	taken := make(chan int, 1)
	go func() { taken <- m.take(t.Context(), 500, time.Hour) }()
	select {
	case got := <-taken:
		t.Fatalf("took %d and did not wait for the rest", got)
	case <-time.After(50 * time.Millisecond):
	}
	m.give(2000)
	if got := <-taken; got != 500 {
		t.Errorf("took %d when all was given back", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m.held = 4000
	if got := m.take(ctx, 500, time.Hour); got != 0 { // a request that has gone does not wait
		t.Errorf("took %d", got)
	}
}

// privateBytes is the memory of a fetch that is nobody else's.
func privateBytes(f *fetch) (n int) {
	if f != nil {
		for _, b := range f.blocks {
			if b.private {
				n += len(b.file.Data)
			}
		}
	}
	return n
}

func TestSeveralRestoresAtOnceStayWithinTheMemory(t *testing.T) {
	const blocks, requests = 8, 6
	tier, store := withSidecar(t, 1, 64*blocks, tierpb.Tier_TIER_LOCAL)
	size := store.blocks[0].size
	most := 11 * size // one of them whole, and a part of the next
	tier.memory.available = func() int { return memoryShare * most }
	var mu sync.Mutex
	var group sync.WaitGroup
	var fetches []*fetch
	for range requests {
		group.Add(1)
		go func() {
			defer group.Done()
			f := tier.prefetch(t.Context(), Text(tokensFrom(0, 1000)), 1000, tier.held0).fetch
			mu.Lock()
			defer mu.Unlock()
			fetches = append(fetches, f)
		}()
	}
	group.Wait()
	held, whole, rows := 0, 0, 0
	for _, f := range fetches {
		if f == nil {
			continue
		}
		held += privateBytes(f)
		rows += f.rows
		if f.rows == 64*blocks {
			whole++
		}
		for i, b := range f.blocks {
			if b.first != 64*i || b.rows != 64 {
				t.Errorf("block %d is at %d, %d rows", i, b.first, b.rows)
			}
		}
	}
	if held > most || held != tier.memory.held {
		t.Errorf("%d bytes are held, allowed are %d, noted %d", held, most, tier.memory.held)
	}
	if whole != 1 || rows != 64*11 {
		t.Errorf("%d restores are whole, %d rows in all", whole, rows)
	}
	if want := uint64(64 * (blocks*requests - 11)); tier.stats.counts.MemoryShortTokens != want {
		t.Errorf("%d tokens counted as too many for the memory, want %d", tier.stats.counts.MemoryShortTokens, want)
	}
	for _, f := range fetches {
		if f != nil {
			f.close()
		}
	}
	if tier.memory.held != 0 {
		t.Errorf("%d bytes are held by nobody", tier.memory.held)
	}
	if f := tier.prefetch(t.Context(), Text(tokensFrom(0, 1000)), 1000, tier.held0).fetch; f == nil || f.rows != 64*blocks {
		t.Errorf("fetched %+v when all memory was back", f)
	}
}

func TestAPartOfThePromptIsRestoredWhenMemoryIsShort(t *testing.T) {
	tier, store := withSidecar(t, 1, 64*4, tierpb.Tier_TIER_LOCAL)
	tier.memory.available = func() int { return memoryShare * (3*store.blocks[0].size - 1) }
	prompt := tokensFrom(0, 1000)
	if f := tier.prefetchFor(t.Context(), prompt); f == nil || f.rows != 128 || len(f.blocks) != 2 {
		t.Fatal("not what there is memory for was fetched")
	}
	if want := 2 * store.blocks[0].size; tier.memory.held != want {
		t.Errorf("%d bytes are held for two blocks of %d", tier.memory.held, want)
	}
	if got := tier.restoreFor(0, prompt, 0); got != 128 {
		t.Fatalf("resumes at %d", got)
	}
	holds(t, tier, 0, 0, 128)
}

func TestNothingIsReadWithoutMemoryAndTheRAMTierNeedsNone(t *testing.T) {
	for where, want := range map[tierpb.Tier]int{tierpb.Tier_TIER_LOCAL: 0, tierpb.Tier_TIER_RAM: 256} {
		tier, _ := withSidecar(t, 1, 64*4, where)
		tier.memory.available = func() int { return 0 }
		tier.files.read = func(path string, _ int) (*kvtier.File, error) {
			t.Errorf("%v: %s was read", where, path)
			return nil, errMemory
		}
		prompt := tokensFrom(0, 1000)
		rows := 0
		if f := tier.prefetchFor(t.Context(), prompt); f != nil {
			rows = f.rows
		}
		if rows != want {
			t.Errorf("%v: %d rows", where, rows)
		}
		if got := tier.restoreFor(0, prompt, 0); got != want {
			t.Errorf("%v: resumes at %d", where, got)
		}
	}
}

func TestABlockThatWasMovedToTheDiskNeedsMemoryToo(t *testing.T) {
	tier, store := withSidecar(t, 1, 64*4, tierpb.Tier_TIER_RAM)
	store.read = tierpb.Tier_TIER_LOCAL
	tier.memory.available = func() int { return memoryShare * 2 * store.blocks[0].size }
	f := tier.prefetch(t.Context(), Text(tokensFrom(0, 1000)), 1000, tier.held0).fetch
	if f == nil || f.rows != 128 || privateBytes(f) != 2*store.blocks[0].size {
		t.Fatalf("fetched %+v", f)
	}
	if tier.stats.counts.MemoryShortTokens != 128 {
		t.Errorf("%d tokens counted as too many for the memory", tier.stats.counts.MemoryShortTokens)
	}
	f.close()
	if tier.memory.held != 0 {
		t.Errorf("%d bytes are held by nobody", tier.memory.held)
	}
}

func TestMemoryOfAReadThatHangsIsHeldUntilItReturns(t *testing.T) {
	tier, store := withSidecar(t, 1, 64*2, tierpb.Tier_TIER_LOCAL)
	tier.memory.available = func() int { return 1 << 30 }
	size := store.blocks[0].size
	ctx, cancel := context.WithCancel(t.Context())
	files := newReaders[*fetchedBlock](tier, 1)
	files.n = 1
	late := outcome[*fetchedBlock]{block: &fetchedBlock{memory: &tier.memory, own: tier.memory.take(ctx, size, 0)}}
	cancel()
	if _, failed := files.collect(ctx); failed[0] != errLate {
		t.Fatalf("collected %v", failed)
	}
	if tier.memory.held != size {
		t.Errorf("%d bytes are held while the read hangs", tier.memory.held)
	}
	files.opened <- late
	for deadline := time.Now().Add(5 * time.Second); tier.late.Load() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the read is still thought to hang")
		}
	}
	if tier.memory.held != 0 {
		t.Errorf("%d bytes are held by nobody", tier.memory.held)
	}
}
