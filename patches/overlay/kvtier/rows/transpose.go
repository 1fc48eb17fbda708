package rows

import (
	"encoding/binary"
	"unsafe"
)

// transpose writes element j of line i of src to element i of line j of dst, for i < lines and j < length. Elements
// have 2 bytes; a line of src starts every srcStride bytes, one of dst every dstStride bytes.
//
// Four by four elements at a time, as four 64-bit words: several times faster than one by one, and without assembly.
func transpose(dst []byte, dstStride int, src []byte, srcStride int, lines, length int) {
	if lines == 0 || length == 0 {
		return
	}
	_, _ = src[srcStride*(lines-1)+2*length-1], dst[dstStride*(length-1)+2*lines-1]
	const even, low = 0x0000ffff0000ffff, 0x00000000ffffffff
	s, d := unsafe.Pointer(&src[0]), unsafe.Pointer(&dst[0])
	word := func(p unsafe.Pointer, at int) *uint64 { return (*uint64)(unsafe.Add(p, at)) }
	j := 0
	for ; nativeLittleEndian && j+4 <= length; j += 4 {
		i := 0
		for ; i+4 <= lines; i += 4 {
			from := i*srcStride + 2*j
			a, b := *word(s, from), *word(s, from+srcStride)
			c, e := *word(s, from+2*srcStride), *word(s, from+3*srcStride)
			ab0, ab1 := a&even|b&even<<16, a>>16&even|b&^even
			ce0, ce1 := c&even|e&even<<16, c>>16&even|e&^even
			to := j*dstStride + 2*i
			*word(d, to) = ab0&low | ce0<<32
			*word(d, to+dstStride) = ab1&low | ce1<<32
			*word(d, to+2*dstStride) = ab0>>32 | ce0&^low
			*word(d, to+3*dstStride) = ab1>>32 | ce1&^low
		}
		transposePlain(dst, dstStride, src, srcStride, i, lines, j, j+4)
	}
	transposePlain(dst, dstStride, src, srcStride, 0, lines, j, length)
}

// transposePlain is transpose, one element at a time, for lines [i0, i1) and elements [j0, j1).
func transposePlain(dst []byte, dstStride int, src []byte, srcStride, i0, i1, j0, j1 int) {
	for i := i0; i < i1; i++ {
		for j := j0; j < j1; j++ {
			copy(dst[j*dstStride+2*i:][:2], src[i*srcStride+2*j:][:2])
		}
	}
}

var nativeLittleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1
