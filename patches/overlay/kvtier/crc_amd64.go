package kvtier

import (
	"hash/crc32"
	"math/bits"

	"golang.org/x/sys/cpu"
)

// foldBytes is what the loop of fold takes at a time.
const foldBytes = 256

// foldBy are the numbers that a run of 16 bytes is multiplied by to stand a distance further on: over foldBytes, over 64 bytes, and
// for the lanes of 64 bytes, of which the last stays.
type foldBy struct {
	block, register [2]uint64
	lanes           [4][2]uint64
}

var (
	castagnoliFold = newFoldBy(crc32.Castagnoli)

	canFold = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ
)

// newFoldBy is for a polynomial with its bits reversed, as hash/crc32 has it. V. Gopal et al., "Fast CRC computation for generic
// polynomials using PCLMULQDQ instruction", Intel 2009.
func newFoldBy(polynomial uint32) *foldBy {
	normal := bits.Reverse32(polynomial)
	power := func(n int) uint64 { // x to the n, modulo the polynomial, reversed
		r := uint32(1)
		for range n {
			r = r<<1 ^ normal&-(r>>31)
		}
		return uint64(bits.Reverse32(r)) << 1
	}
	over := func(distance int) [2]uint64 { return [2]uint64{power(distance + 32), power(distance - 32)} }
	return &foldBy{
		block: over(8 * foldBytes), register: over(512),
		lanes: [4][2]uint64{over(384), over(256), over(128)},
	}
}

// fold returns 16 bytes with the same remainder as so many blocks of foldBytes, at least one, that a checksum goes on with.
//
//go:noescape
func fold(crc uint32, data *byte, blocks int, by *foldBy, rest *[16]byte)

// updateCRC is crc32.Update with the CRC-32C. Multiplying without carry takes a quarter of the time of the CPU's CRC
// instruction where 64 bytes can be multiplied at once.
func updateCRC(crc uint32, data []byte) uint32 {
	if blocks := len(data) / foldBytes; canFold && blocks > 0 {
		var rest [16]byte
		fold(^crc, &data[0], blocks, castagnoliFold, &rest)
		crc = crc32.Update(^uint32(0), castagnoli, rest[:])
		data = data[blocks*foldBytes:]
	}
	return crc32.Update(crc, castagnoli, data)
}
