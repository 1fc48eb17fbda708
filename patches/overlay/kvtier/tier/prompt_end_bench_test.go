package tier

import (
	"slices"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// timedHost is told how long its lock is held.
type timedHost struct {
	*fakeHost
	since   time.Time
	longest time.Duration
}

func (h *timedHost) Lock() {
	h.fakeHost.Lock()
	h.since = time.Now()
}

func (h *timedHost) Unlock() {
	h.longest = max(h.longest, time.Since(h.since))
	h.fakeHost.Unlock()
}

// How long the Host's lock is held for the rows before a prompt's last token, of gemma3-4b's shape: at a time (held), and how long
// copying all of them keeps the next batch waiting (kept).
//
//	go test ./kvtier/tier -run none -bench PromptEnd -benchtime 20x
func BenchmarkPromptEnd(b *testing.B) {
	const layers, rowBytes = 29, 4 * 256 * 2
	host := &timedHost{fakeHost: newFakeHost()}
	tier := &Tier{host: host, up: func() bool { return true }, config: kvtier.Config{Snapshot: true}}
	model := Model{Slots: 1, DType: "f16", OnHost: true, Description: &tierpb.Namespace{}}
	r := newFakeRows(0)
	w := Window{Child: 1, Size: fakeCells, Cells: fakeCells, DType: "f16"}
	for layer := range layers {
		w.Layers = append(w.Layers, kvtier.Layer{
			Child: 1, Layer: layer, Kind: "swa", Window: fakeCells, KVHeads: 4, KHeadDim: 256, VHeadDim: 256,
			KRowBytes: rowBytes, VRowBytes: rowBytes,
		})
		for range 2 {
			data := make(fakeTensor, fakeCells*rowBytes)
			for i := range data {
				data[i] = 1
			}
			r.planes = append(r.planes, rows.Plane{Tensor: data, RowBytes: rowBytes, Cells: fakeCells})
		}
	}
	for i := range r.slot {
		r.slot[i], r.position[i] = 0, i
	}
	w.Rows = fakeWindowRows{r}
	model.Windows = []Window{w}
	tier.bind(r, model)
	active.Store(tier)
	defer active.Store(nil)
	ts := &tier.slots[0]
	ts.prompt = fakeCells + 1
	noted, kept, held := time.Duration(0), time.Duration(0), []time.Duration(nil)
	for b.Loop() {
		start := time.Now()
		ts.notePromptEnd(tier)
		noted = max(noted, time.Since(start))
		time.Sleep(100 * time.Millisecond) // the batch
		host.longest = 0
		start = time.Now()
		host.Lock()
		ts.keepPromptEnd(tier, true)
		host.Unlock()
		kept += time.Since(start)
		held = append(held, host.longest)
		if ts.lineage.promptEnd == nil {
			b.Fatal("nothing was kept")
		}
		ts.lineage = newLineage(0)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(noted.Microseconds())/1e3, "noted-ms-at-most")
	slices.Sort(held)
	b.ReportMetric(float64(held[len(held)/2].Microseconds())/1e3, "held-ms")
	b.ReportMetric(float64(held[len(held)-1].Microseconds())/1e3, "held-ms-at-most")
	b.ReportMetric(float64(kept.Microseconds())/1e3/float64(b.N), "kept-ms")
}
