package rows

import (
	"bytes"
	"math/rand"
	"testing"
)

func TestTransposeEqualsThePlainOneForEveryShape(t *testing.T) {
	for _, lines := range []int{1, 2, 3, 4, 5, 7, 8, 64} {
		for _, length := range []int{1, 2, 3, 4, 6, 9, 32} {
			srcStride, dstStride := 2*length+6, 2*lines+10
			src := make([]byte, srcStride*lines)
			rand.New(rand.NewSource(1)).Read(src)
			got, want := make([]byte, dstStride*length), make([]byte, dstStride*length)
			transpose(got, dstStride, src, srcStride, lines, length)
			transposePlain(want, dstStride, src, srcStride, 0, lines, 0, length)
			if !bytes.Equal(got, want) {
				t.Errorf("%d lines of %d elements differ", lines, length)
			}
		}
	}
}

// BenchmarkTranspose is one block of one layer's V, 8 heads of 128, in a cache of 8192 cells.
func BenchmarkTranspose(b *testing.B) {
	const rows, columns, cells = 64, 1024, 8192
	src, dst := make([]byte, 2*rows*columns), make([]byte, 2*cells*columns)
	for name, do := range map[string]func(){
		"words": func() { transpose(dst, 2*cells, src, 2*columns, rows, columns) },
		"plain": func() { transposePlain(dst, 2*cells, src, 2*columns, 0, rows, 0, columns) },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(src)))
			for range b.N {
				do()
			}
		})
	}
}
