package tiering

import "time"

// measureMemcpy times a plain copy of the bytes that were restored into memory that has been touched before: by one thread,
// and by as many as a restore uses. For benchmarks only: what is only open is read for that.
func measureMemcpy(f *fetch) (one, all float64) {
	var sources [][]byte
	total := 0
	for _, b := range f.blocks {
		for i, s := range b.block.Header.Segments {
			total += int(s.StoredBytes)
			if b.private {
				sources = append(sources, b.block.Segment(i))
				continue
			}
			sources = append(sources, make([]byte, s.StoredBytes))
			if b.block.ReadSegment(sources[len(sources)-1:], i) != nil {
				return 0, 0
			}
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
