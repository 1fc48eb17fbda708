package tier

import (
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// benchRows are cells of which a slot has all or none, in order.
type benchRows struct {
	planes []rows.Plane
	cells  int
	held   bool
}

func (r *benchRows) Cells(_, from, to int) (cells []int32) {
	for i := from; i < to && r.held; i++ {
		cells = append(cells, int32(i))
	}
	return cells
}

func (r *benchRows) Find(_, from, n int, _ map[int32]struct{}) (cells []int32) {
	for i := from; i < from+n; i++ {
		cells = append(cells, int32(i))
	}
	return cells
}

func (r *benchRows) Read(segment int, cells []int32, dst []byte) { r.planes[segment].Read(cells, dst) }

func (r *benchRows) Write(segment int, cells []int32, chunk rows.Chunk) {
	r.planes[segment].Write(cells, chunk)
}

func (r *benchRows) Memory(segment int, cells []int32) [][]byte {
	return r.planes[segment].Memory(cells)
}

func (r *benchRows) Occupy(int, int, []int32) { r.held = true }

func (r *benchRows) Drop(int, int) { r.held = false }

// The steps of a restore from the RAM tier of qwen3-0.6b's shape, without the sidecar's own time, beside a memcpy by one thread.
//
//	go test ./kvtier/tier -run none -bench Restore -benchtime 10x
func BenchmarkRestore(b *testing.B) {
	const tokens, layers, rowBytes = 4096, 28, 8 * 128 * 2
	tier, store := withSidecar(b, 1, 0, tierpb.Tier_TIER_RAM)
	tier.model.Layers = nil
	r := &benchRows{cells: tokens}
	for layer := range layers {
		tier.model.Layers = append(tier.model.Layers, kvtier.Layer{
			Layer: layer, Kind: "full", KVHeads: 8, KHeadDim: 128, VHeadDim: 128, KRowBytes: rowBytes, VRowBytes: rowBytes,
		})
		for range 2 {
			plane := make(fakeTensor, tokens*rowBytes)
			for i := 0; i < len(plane); i += 4096 {
				plane[i] = 1
			}
			r.planes = append(r.planes, rows.Plane{Tensor: plane, RowBytes: rowBytes, Cells: tokens})
		}
	}
	tier.rows = r
	dir, err := os.MkdirTemp("/dev/shm", "kvtier-bench-")
	if err != nil {
		b.Skip("no tmpfs here: ", err)
	}
	defer os.RemoveAll(dir)
	store.dir = dir
	store.store(b, tier, tokens)
	prompt := tokensFrom(0, tokens+1)
	var looked, fetched, copied, closed, used, plain []float64
	ms := func(seconds float64) float64 { return 1e3 * seconds }
	for b.Loop() {
		r.held = false
		before := processorSeconds(b)
		l := tier.prefetch(b.Context(), Text(prompt), len(prompt), func() (slot, rows int) { return 0, 0 })
		if l.fetch == nil || l.fetch.rows != tokens {
			b.Fatalf("fetched %+v, %v", l.fetch, l.short)
		}
		if resume, cut := tier.restoreFrom(l, 0, 0); resume != tokens {
			b.Fatalf("resumes at %d, %v", resume, cut)
		}
		seconds := processorSeconds(b) - before
		one, _ := measureMemcpy(l.fetch)
		before = processorSeconds(b)
		start := time.Now()
		l.fetch.close()
		closed = append(closed, ms(time.Since(start).Seconds()))
		used = append(used, ms(seconds+processorSeconds(b)-before))
		report := &l.fetch.report
		looked, fetched = append(looked, ms(report.LookupSeconds)), append(fetched, ms(report.FetchSeconds))
		copied, plain = append(copied, ms(report.CopySeconds)), append(plain, ms(one))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(slices.Min(looked), "look-up-ms")
	b.ReportMetric(slices.Min(fetched), "fetch-ms")
	b.ReportMetric(slices.Min(copied), "locked-ms")
	b.ReportMetric(slices.Min(closed), "closed-ms")
	b.ReportMetric(slices.Min(used), "processor-ms")
	b.ReportMetric((slices.Min(fetched)+slices.Min(copied))/slices.Min(plain), "x-memcpy")
}

// processorSeconds is the processors' time that this process has used.
func processorSeconds(b *testing.B) float64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}
