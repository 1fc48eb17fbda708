package ollamarunner

import (
	"errors"
	"log/slog"
	"math"
	"runtime"
	"runtime/debug"
	"sync"
	"time"
)

// restore copies rows [numPast, f.rows) into free cells of the slot and returns the position to resume from. The caller
// holds Server.mu. A row is in the cache afterwards in all layers or in none; rows from a damaged block on are not.
func (t *kvTier) restore(f *tierFetch, slot *InputCacheSlot, numPast int32) int32 {
	if int(numPast) < f.from || int(numPast) >= f.rows {
		return numPast
	}
	if numPast > t.slots[slot.Id].taint {
		return numPast // what is in memory is not what the tokens alone would give: stay with it, as stock does
	}
	start := time.Now()
	defer func() { t.stats.spent(time.Since(start)) }()
	t.beforeRestore()
	cells := t.cache.KVTierFreeCells(f.rows-int(numPast), t.avoid())
	if len(cells) < t.config.MinTokens {
		return numPast
	}
	copying := time.Now()
	rows, err := t.copyIn(f, int(numPast), cells)
	if err != nil {
		slog.Warn("kv restore failed, recomputing", "error", err)
		return numPast
	}
	if rows < len(cells) {
		cells = cells[:rows]
		f.report.Bytes = uint64(rows) * t.rowBytes()
	}
	if rows < t.config.MinTokens {
		return numPast
	}
	f.report.CopySeconds = time.Since(copying).Seconds()
	t.cache.KVTierOccupy(slot.Id, numPast, cells)
	resume := numPast + int32(len(cells))
	if t.cache.KVTierCells(slot.Id, 0, resume) == nil {
		slog.Error("kv restore left a gap, recomputing", "slot", slot.Id, "from", numPast, "to", resume)
		_ = t.cache.Remove(slot.Id, numPast, math.MaxInt32)
		return numPast
	}
	f.report.Tokens = uint64(len(cells))
	t.stats.restored(f)
	slog.Info("kv restored", "slot", slot.Id, "from", numPast, "tokens", len(cells), "bytes", f.report.Bytes,
		"fetch", seconds(f.report.FetchSeconds), "copy", seconds(f.report.CopySeconds), "locked", time.Since(start))
	return resume
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// rowBytes is the bytes of one position over all layers, K and V.
func (t *kvTier) rowBytes() uint64 {
	n := 0
	for _, l := range t.layers {
		n += l.KRowBytes + l.VRowBytes
	}
	return uint64(n)
}

func tierWorkers() int {
	return max(1, min(8, runtime.NumCPU()))
}

// tierParallel runs do(0) … do(n-1) on some goroutines. A memory fault in one is an error.
func tierParallel(workers, n int, do func(i int)) error {
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for w := range errs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
			defer func() {
				if p := recover(); p != nil {
					errs[w] = errors.New("fault while copying")
					slog.Error("kv tiering: panic while copying", "panic", p)
				}
			}()
			for i := w; i < n; i += len(errs) {
				do(i)
			}
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
}
