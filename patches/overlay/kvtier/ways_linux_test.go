package kvtier

import (
	"fmt"
	"hash/crc32"
	"math/rand"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The ways from block files in memory into cells, with every byte checked, beside a memcpy of as many bytes by one thread. The
// product's is "readv into cells".
//
//	go test ./kvtier -run none -bench Ways -benchtime 5x

const (
	wayBlocks = 32
	waySeg    = 64 * 2048 // bytes of a segment: 64 rows of qwen3-0.6b
	waySegs   = 2 * 28
)

// way is one of them. prepare is what can be done before the runner's lock is held; into has segment i of block n copied.
type way struct {
	name    string
	prepare func(w *ways, n int) *File
	into    func(w *ways, f *File, n, i int, buffer []byte)
}

// ways has the files, and a plane of cells for each segment.
type ways struct {
	b      *testing.B
	layout *Layout
	paths  []string
	header *Block // of all files
	planes [][]byte
}

func (w *ways) must(err error) {
	if err != nil {
		w.b.Error(err)
	}
}

func (w *ways) check(i int, crc uint32) { w.must(w.header.compare(i, crc)) }

func (w *ways) cells(n, i int) []byte { return w.planes[i][n*waySeg : (n+1)*waySeg] }

// touched is memory of the kind that a tensor has.
func touched(b *testing.B, n int) []byte {
	data, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = syscall.Munmap(data) })
	_ = syscall.Madvise(data, syscall.MADV_HUGEPAGE)
	for i := 0; i < n; i += alignment {
		data[i] = 1
	}
	return data
}

func newWays(b *testing.B) *ways {
	layers := make([]Layer, waySegs/2)
	for i := range layers {
		layers[i] = Layer{Layer: i, Kind: "full", KVHeads: 8, KHeadDim: 128, VHeadDim: 128, KRowBytes: 2048, VRowBytes: 2048}
	}
	w := &ways{b: b, layout: NewLayout(layers, BlockTokens, 0)}
	content := make([]byte, w.layout.FileBytes)
	rand.New(rand.NewSource(1)).Read(content)
	ns := NamespaceOf(Description{Model: "m", Layers: layers}.Proto())
	tokens := TokenBytes(make([]int32, BlockTokens))
	if err := w.layout.Seal(content, ns, BlockKey(ns, tokens, nil), ns, 0, tokens, nil, "f16"); err != nil {
		b.Fatal(err)
	}
	dir, err := os.MkdirTemp("/dev/shm", "kvtier-bench-")
	if err != nil {
		b.Skip("no tmpfs here: ", err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	for n := range wayBlocks {
		w.paths = append(w.paths, filepath.Join(dir, fmt.Sprint(n)))
		if err := os.WriteFile(w.paths[n], content, 0o600); err != nil {
			b.Fatal(err)
		}
	}
	if w.header, err = Open(content); err != nil {
		b.Fatal(err)
	}
	for range waySegs {
		w.planes = append(w.planes, touched(b, wayBlocks*waySeg))
	}
	return w
}

func mapped(flags int, touch bool) func(w *ways, n int) *File {
	return func(w *ways, n int) *File {
		fd, err := openBlock(w.paths[n], w.layout.FileBytes, os.O_RDONLY)
		w.must(err)
		defer fd.Close()
		data, err := syscall.Mmap(int(fd.Fd()), 0, w.layout.FileBytes, syscall.PROT_READ, syscall.MAP_SHARED|flags)
		w.must(err)
		if touch {
			sum := byte(0)
			for i := 0; i < len(data); i += alignment {
				sum += data[i]
			}
			w.planes[0][0] = sum
		}
		return &File{Data: data}
	}
}

// throughBuffer copies a mapped segment to a buffer, checks it there in steps, and copies it on.
func throughBuffer(w *ways, f *File, n, i int, buffer []byte) {
	const step = 16 << 10
	from, crc := f.Data[w.layout.Segments[i].Offset:][:waySeg], uint32(0)
	for at := 0; at < waySeg; at += step {
		copy(buffer[at:at+step], from[at:at+step])
		crc = crc32.Update(crc, castagnoli, buffer[at:at+step])
	}
	w.check(i, crc)
	copy(w.cells(n, i), buffer[:waySeg])
}

func opened(w *ways, n int) *File {
	f, err := OpenFile(w.paths[n], w.layout.FileBytes)
	w.must(err)
	return f
}

// readBuffer reads a segment into a buffer in steps, checks each, and copies it on.
func readBuffer(step int) func(w *ways, f *File, n, i int, buffer []byte) {
	return func(w *ways, f *File, n, i int, buffer []byte) {
		crc := uint32(0)
		for at := 0; at < waySeg; at += step {
			part := buffer[at : at+step]
			w.must(f.readAt([][]byte{part}, w.layout.Segments[i].Offset+at))
			crc = crc32.Update(crc, castagnoli, part)
		}
		w.check(i, crc)
		copy(w.cells(n, i), buffer[:waySeg])
	}
}

// readBlock reads several segments at once into a buffer, checks them, and copies them on.
func readBlock(segments int) func(w *ways, f *File, n, i int, buffer []byte) {
	return func(w *ways, f *File, n, i int, buffer []byte) {
		if i%segments != 0 {
			return
		}
		most := min(segments, waySegs-i)
		w.must(f.readAt([][]byte{buffer[:most*waySeg]}, w.layout.Segments[i].Offset))
		for k := range most {
			part := buffer[k*waySeg : (k+1)*waySeg]
			w.check(i+k, crc32.Checksum(part, castagnoli))
			copy(w.cells(n, i+k), part)
		}
	}
}

// readCells reads a segment straight into its cells in steps, and checks each there.
func readCells(step int) func(w *ways, f *File, n, i int, _ []byte) {
	return func(w *ways, f *File, n, i int, _ []byte) {
		crc := uint32(0)
		for at := 0; at < waySeg; at += step {
			part := w.cells(n, i)[at : at+step]
			w.must(f.readAt([][]byte{part}, w.layout.Segments[i].Offset+at))
			crc = crc32.Update(crc, castagnoli, part)
		}
		w.check(i, crc)
	}
}

func BenchmarkWays(b *testing.B) {
	populate := syscall.MAP_POPULATE
	for _, c := range []way{
		{"map and touch, buffer, cells", mapped(0, true), throughBuffer},
		{"map populated, buffer, cells", mapped(populate, false), throughBuffer},
		{"map, buffer, cells", mapped(0, false), throughBuffer},
		{"read 16K, buffer, cells", opened, readBuffer(16 << 10)},
		{"read 64K, buffer, cells", opened, readBuffer(64 << 10)},
		{"read 128K, buffer, cells", opened, readBuffer(128 << 10)},
		{"read 1M, buffer, cells", opened, readBlock(8)},
		{"read 4M, buffer, cells", opened, readBlock(32)},
		{"read 16K into cells", opened, readCells(16 << 10)},
		{"read 64K into cells", opened, readCells(64 << 10)},
		{"readv into cells", opened, func(w *ways, f *File, n, i int, _ []byte) {
			block := *w.header
			block.file = f
			w.must(block.ReadSegment([][]byte{w.cells(n, i)}, i))
		}},
		{"readv into 8 pieces of cells", opened, func(w *ways, f *File, n, i int, _ []byte) {
			block, cells := *w.header, w.cells(n, i)
			block.file = f
			var parts [][]byte
			for at := 0; at < waySeg; at += waySeg / 8 {
				parts = append(parts, cells[at:at+waySeg/8])
			}
			w.must(block.ReadSegment(parts, i))
		}},
	} {
		for _, threads := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/%d", c.name, threads), func(b *testing.B) { c.measure(newWays(b), threads) })
		}
	}
}

func (c way) measure(w *ways, threads int) {
	total := wayBlocks * waySegs * waySeg
	src, dst := touched(w.b, total), touched(w.b, total)
	buffers := make([][]byte, threads)
	for t := range buffers {
		buffers[t] = touched(w.b, 4<<20)
	}
	const never = time.Hour
	before, held, after, plain := never, never, never, never
	for w.b.Loop() {
		start := time.Now()
		copy(dst, src)
		plain = min(plain, time.Since(start))

		start = time.Now()
		files := make([]*File, wayBlocks)
		each(threads, wayBlocks, func(_, n int) { files[n] = c.prepare(w, n) })
		before = min(before, time.Since(start))
		start = time.Now()
		each(threads, waySegs, func(t, i int) {
			for n := range wayBlocks {
				c.into(w, files[n], n, i, buffers[t])
			}
		})
		held = min(held, time.Since(start))
		start = time.Now()
		for _, f := range files {
			f.Close()
		}
		after = min(after, time.Since(start))
	}
	ns := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / float64(total) }
	w.b.ReportMetric(0, "ns/op")
	w.b.ReportMetric(ns(before), "before-ns/B")
	w.b.ReportMetric(ns(held), "locked-ns/B")
	w.b.ReportMetric(ns(after), "after-ns/B")
	w.b.ReportMetric(float64(before+held)/float64(plain), "x-memcpy")
	w.b.ReportMetric(float64(before+held+after)/float64(plain), "x-memcpy-with-after")
}

// each runs do(thread, 0) … do(thread, n-1) on some goroutines.
func each(threads, n int, do func(thread, i int)) {
	var group sync.WaitGroup
	for t := range threads {
		group.Add(1)
		go func() {
			defer group.Done()
			for i := t; i < n; i += threads {
				do(t, i)
			}
		}()
	}
	group.Wait()
}
