package tier

import (
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// How long the Host's lock is held for the rows before a prompt's last token, of gemma3-4b's shape.
//
//	go test ./kvtier/tier -run none -bench PromptEnd -benchtime 20x
func BenchmarkPromptEnd(b *testing.B) {
	const layers, rowBytes = 29, 4 * 256 * 2
	tier := &Tier{host: newFakeHost(), up: func() bool { return true }, config: kvtier.Config{Snapshot: true}}
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
	ts := &tier.slots[0]
	ts.prompt = fakeCells + 1
	noted, kept := time.Duration(0), time.Duration(0)
	for b.Loop() {
		start := time.Now()
		ts.notePromptEnd(tier)
		noted = max(noted, time.Since(start))
		time.Sleep(100 * time.Millisecond) // the batch
		start = time.Now()
		ts.keepPromptEnd(tier)
		kept += time.Since(start)
		if ts.lineage.promptEnd == nil {
			b.Fatal("nothing was kept")
		}
		ts.lineage = newLineage(0)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(noted.Microseconds())/1e3, "noted-ms-at-most")
	b.ReportMetric(float64(kept.Microseconds())/1e3/float64(b.N), "kept-ms")
}
