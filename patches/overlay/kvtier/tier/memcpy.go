package tier

import "time"

// measureMemcpy times a plain copy of the bytes that were restored into memory that has been touched before: by one thread,
// and by as many as a restore uses. For benchmarks only.
func measureMemcpy(f *fetch) (one, all float64) {
	var sources [][]byte
	total := 0
	for _, b := range f.blocks {
		for i := range b.block.Header.Segments {
			sources = append(sources, b.block.Segment(i))
			total += len(sources[len(sources)-1])
		}
	}
	dst := make([]byte, total)
	offsets := make([]int, len(sources))
	at := 0
	for i, src := range sources {
		offsets[i] = at
		at += len(src)
	}
	run := func(workers int) float64 {
		start := time.Now()
		_ = parallel(workers, len(sources), func(i int) { copy(dst[offsets[i]:], sources[i]) })
		return time.Since(start).Seconds()
	}
	run(1) // touches dst
	return min(run(1), run(1)), min(run(workerCount()), run(workerCount()))
}
