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
