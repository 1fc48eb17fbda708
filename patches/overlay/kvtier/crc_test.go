package kvtier

import (
	"hash/crc32"
	"math/rand"
	"testing"
)

func TestChecksumsAreCRC32CWhateverTheLengthAndTheStart(t *testing.T) {
	data := make([]byte, 5000)
	rand.New(rand.NewSource(1)).Read(data)
	for _, first := range []int{0, 1, 7, 63} {
		for n := range 1500 {
			part := data[first : first+n]
			before := uint32(n) * 2654435761
			if got, want := updateCRC(before, part), crc32.Update(before, castagnoli, part); got != want {
				t.Fatalf("%d bytes from %d on: %08x, want %08x", n, first, got, want)
			}
		}
	}
	if got, want := checksum(data), crc32.Checksum(data, castagnoli); got != want {
		t.Errorf("%08x, want %08x", got, want)
	}
	if canFold {
		canFold = false
		defer func() { canFold = true }()
		if got, want := checksum(data), crc32.Checksum(data, castagnoli); got != want {
			t.Errorf("%08x, want %08x", got, want)
		}
	}
	// in parts, as rows in several cells are
	crc := updateCRC(updateCRC(0, data[:2048]), data[2048:])
	if want := crc32.Checksum(data, castagnoli); crc != want {
		t.Errorf("%08x, want %08x", crc, want)
	}
}

func TestOneFlippedBitChangesTheChecksum(t *testing.T) {
	data := make([]byte, 1100)
	rand.New(rand.NewSource(1)).Read(data)
	want := updateCRC(0, data)
	for i := range 8 * len(data) {
		data[i/8] ^= 1 << (i % 8)
		if updateCRC(0, data) == want {
			t.Fatalf("bit %d", i)
		}
		data[i/8] ^= 1 << (i % 8)
	}
}
