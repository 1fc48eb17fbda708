package kvtier

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"
)

var testLayers = []Layer{
	{Layer: 0, Kind: "full", KVHeads: 2, KHeadDim: 4, VHeadDim: 8, KRowBytes: 16, VRowBytes: 32},
	{Layer: 3, Kind: "full", KVHeads: 2, KHeadDim: 4, VHeadDim: 8, KRowBytes: 16, VRowBytes: 32},
}

// sealed returns a block file of rows rows, its layout and its tokens.
func sealed(t *testing.T, rows int) ([]byte, *Layout, Namespace, Key, []byte) {
	t.Helper()
	l := NewLayout(testLayers, rows, 0)
	file := make([]byte, l.FileBytes)
	for i, s := range l.Segments {
		for j := range s.Bytes {
			file[s.Offset+j] = byte(i*31 + j)
		}
	}
	ns := NamespaceOf(Description{Model: "m", Layers: testLayers}.Proto())
	ids := make([]int32, rows)
	for i := range ids {
		ids[i] = int32(1000 + i)
	}
	tokens := TokenBytes(ids)
	key := BlockKey(ns, tokens, nil)
	if err := l.Seal(file, ns, key, ns, 0, tokens, nil, "f16"); err != nil {
		t.Fatal(err)
	}
	return file, l, ns, key, tokens
}

func TestSealedBlockIsReadBack(t *testing.T) {
	for _, rows := range []int{1, 63, 64} {
		file, l, ns, key, tokens := sealed(t, rows)
		b, err := Open(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Verify(); err != nil {
			t.Fatal(err)
		}
		if err := b.Matches(ns, key, ns, 0, rows, tokens, nil, testLayers, "f16"); err != nil {
			t.Fatal(err)
		}
		for i, s := range l.Segments {
			if !bytes.Equal(b.Segment(i), file[s.Offset:s.Offset+s.Bytes]) {
				t.Errorf("segment %d differs", i)
			}
		}
	}
}

func TestASealedFileHasNothingOfTheMemoryItWasMadeIn(t *testing.T) {
	file, l, ns, key, tokens := sealed(t, 3)
	dirty := bytes.Repeat([]byte{0xa5}, len(file))
	for _, s := range l.Segments {
		copy(dirty[s.Offset:s.Offset+s.Bytes], file[s.Offset:])
	}
	if err := l.Seal(dirty, ns, key, ns, 0, tokens, nil, "f16"); err != nil {
		t.Fatal(err)
	}
	b, err := Open(dirty)
	if err != nil {
		t.Fatal(err)
	}
	used := func(i int) bool {
		if i < preambleBytes+int(binary.LittleEndian.Uint32(dirty[12:])) {
			return true
		}
		return slices.ContainsFunc(l.Segments, func(s SegmentSpan) bool { return i >= s.Offset && i < s.Offset+s.Bytes })
	}
	for i, c := range dirty {
		if !used(i) && c != 0 {
			t.Fatalf("byte %d of %d is %#x", i, len(dirty), c)
		}
	}
	if err := b.Verify(); err != nil {
		t.Error(err)
	}
}

func TestEveryFlippedBitOfABlockIsFound(t *testing.T) {
	file, l, _, _, _ := sealed(t, 3)
	headerEnd := preambleBytes + int(binary.LittleEndian.Uint32(file[12:]))
	used := func(i int) bool {
		if i < headerEnd {
			return true
		}
		return slices.ContainsFunc(l.Segments, func(s SegmentSpan) bool { return i >= s.Offset && i < s.Offset+s.Bytes })
	}
	for i := range file {
		if !used(i) {
			continue // padding
		}
		file[i] ^= 1 << (i % 8)
		if b, err := Open(file); err == nil && b.Verify() == nil {
			t.Fatalf("a flipped bit in byte %d was not found", i)
		}
		file[i] ^= 1 << (i % 8)
	}
}

func TestBlockOfAnotherPromptOrModelDoesNotMatch(t *testing.T) {
	file, _, ns, key, tokens := sealed(t, 8)
	b, err := Open(file)
	if err != nil {
		t.Fatal(err)
	}
	other := bytes.Clone(tokens)
	other[4*5]++
	if err := b.Matches(ns, key, ns, 0, 5, other, nil, testLayers, "f16"); err != nil {
		t.Errorf("the first 5 rows are the prompt's, yet: %v", err)
	}
	wide := []Layer{testLayers[0], {Layer: 3, Kind: "full", KVHeads: 2, KHeadDim: 8, VHeadDim: 8, KRowBytes: 32, VRowBytes: 32}}
	for name, err := range map[string]error{
		"tokens":    b.Matches(ns, key, ns, 0, 6, other, nil, testLayers, "f16"),
		"rows":      b.Matches(ns, key, ns, 0, 9, append(bytes.Clone(tokens), tokens...), nil, testLayers, "f16"),
		"position":  b.Matches(ns, key, ns, 64, 8, tokens, nil, testLayers, "f16"),
		"key":       b.Matches(ns, Key{1}, ns, 0, 8, tokens, nil, testLayers, "f16"),
		"parent":    b.Matches(ns, key, Key{1}, 0, 8, tokens, nil, testLayers, "f16"),
		"namespace": b.Matches(Namespace{1}, key, ns, 0, 8, tokens, nil, testLayers, "f16"),
		"geometry":  b.Matches(ns, key, ns, 0, 8, tokens, nil, wide, "f16"),
		"layers":    b.Matches(ns, key, ns, 0, 8, tokens, nil, testLayers[:1], "f16"),
		"dtype":     b.Matches(ns, key, ns, 0, 8, tokens, nil, testLayers, "q8_0"),
	} {
		if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrFormat) {
			t.Errorf("another %s matches: %v", name, err)
		}
	}
}

func TestABlockWithRowsOfAnotherHistoryThanItsKeySaysIsRefused(t *testing.T) {
	ns, tokens := Namespace{7}, TokenBytes([]int32{1, 2, 3})
	l := NewLayout(testLayers, 3, 0)
	file := make([]byte, l.FileBytes)
	crcs := l.Checksums(file)
	for _, c := range []struct {
		fingerprint []byte
		right       bool
	}{{FingerprintOf(crcs), true}, {FingerprintOf(append([]uint32{1}, crcs[1:]...)), false}, {nil, true}} {
		key := RowsKey(ns, tokens, nil, c.fingerprint)
		if err := l.SealRows(file, ns, key, ns, 0, tokens, nil, "f16", c.fingerprint, crcs); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(file); (err == nil) != c.right {
			t.Errorf("fingerprint %x: %v", c.fingerprint, err)
		}
	}
}
