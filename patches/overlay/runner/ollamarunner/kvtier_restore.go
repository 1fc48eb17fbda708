package ollamarunner

import (
	"errors"
	"log/slog"
	"math"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/ollama/ollama/kvcache"
)

// restore copies rows [numPast, f.rows) into free cells of the slot and returns the position to resume from. The caller
// holds Server.mu. Either all of them are in the cache afterwards or none.
func (t *kvTier) restore(f *tierFetch, slot *InputCacheSlot, numPast int32) int32 {
	if int(numPast) < f.from || int(numPast) >= f.rows {
		return numPast
	}
	if numPast > t.slots[slot.Id].taint {
		return numPast // what is in memory is not what the tokens alone would give: stay with it, as stock does
	}
	start := time.Now()
	t.beforeRestore()
	cells := t.cache.KVTierFreeCells(f.rows-int(numPast), t.avoid())
	if len(cells) < t.config.MinTokens {
		return numPast
	}
	copying := time.Now()
	if err := t.copyIn(f, int(numPast), cells); err != nil {
		slog.Warn("kv restore failed, recomputing", "error", err)
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

// copyIn writes the rows from position from on into cells, layers shared out over a few goroutines.
func (t *kvTier) copyIn(f *tierFetch, from int, cells []int32) error {
	return tierParallel(tierWorkers(), 2*len(t.layers), func(i int) {
		var chunks []kvcache.KVTierChunk
		layer := t.layers[i/2]
		for _, b := range f.blocks {
			skip := max(0, from-b.first)
			rows := min(b.rows, from+len(cells)-b.first)
			if rows <= skip {
				continue
			}
			segment := b.block.Segment(i)
			rowBytes := int(b.block.Header.Segments[i].RowBytes)
			chunks = append(chunks, kvcache.KVTierChunk{Start: b.first + skip - from, Data: segment[skip*rowBytes : rows*rowBytes]})
		}
		t.cache.KVTierWrite(layer.Layer, i%2 == 1, cells, chunks)
	})
}

// rowBytes is the bytes of one position over all layers, K and V.
func (t *kvTier) rowBytes() uint64 {
	n := 0
	for _, l := range t.layers {
		n += l.KVHeads * (l.KHeadDim + l.VHeadDim) * t.elemBytes
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
