package kvtier

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/ollama/ollama/kvtier/madeblock"
	"github.com/ollama/ollama/kvtier/tierpb"
)

var testLayers = []Layer{
	{Layer: 0, Kind: "full", KVHeads: 2, KHeadDim: 4, VHeadDim: 8, KRowBytes: 16, VRowBytes: 32},
	{Layer: 3, Kind: "full", KVHeads: 2, KHeadDim: 4, VHeadDim: 8, KRowBytes: 16, VRowBytes: 32},
}

// headerOf is the header, without what follows from the rows, of the block of tokens that follows parent.
func headerOf(layers []Layer, ns Namespace, parent Key, first int, tokens, fingerprint []byte) *tierpb.BlockHeader {
	key := BlockKey(parent, tokens, nil, fingerprint)
	return &tierpb.BlockHeader{
		Namespace: ns[:], Key: key[:], Parent: parent[:], FirstPosition: uint32(first), Tokens: tokens, Fingerprint: fingerprint,
		Segments: SegmentsOf(layers, "f16"),
	}
}

// made returns a block file of so many rows, its namespace, key and tokens.
func made(rows int) ([]byte, Namespace, Key, []byte) {
	ns := NamespaceOf(Description{Model: "m", Layers: testLayers}.Proto())
	ids := make([]int32, rows)
	for i := range ids {
		ids[i] = int32(1000 + i)
	}
	h := headerOf(testLayers, ns, Key(ns), 0, TokenBytes(ids), nil)
	payload := madeblock.Payload(h, segmentByte)
	return madeblock.File(h, payload), ns, Key(h.Key), h.Tokens
}

func segmentByte(segment, at int) byte { return byte(segment*31 + at) }

func TestABlockIsReadBack(t *testing.T) {
	for _, rows := range []int{1, 63, 64} {
		file, ns, key, tokens := made(rows)
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
		for i, s := range NewLayout(testLayers, rows).Segments {
			if got := b.Segment(i); len(got) != s.Bytes || int(b.Header.Segments[i].Offset) != s.Offset {
				t.Errorf("segment %d of %d bytes, at %d", i, len(got), b.Header.Segments[i].Offset)
			}
			for at, c := range b.Segment(i) {
				if c != segmentByte(i, at) {
					t.Fatalf("segment %d, byte %d: %d", i, at, c)
				}
			}
		}
	}
}

func TestAPayloadHasNothingOfTheMemoryItWasMadeIn(t *testing.T) {
	l := NewLayout(testLayers, 3)
	payload := bytes.Repeat([]byte{0xa5}, l.Bytes)
	l.Checksums(payload)
	used := func(i int) bool {
		return slices.ContainsFunc(l.Segments, func(s SegmentSpan) bool { return i >= s.Offset && i < s.Offset+s.Bytes })
	}
	for i, c := range payload {
		if (c != 0) != used(i) {
			t.Fatalf("byte %d of %d is %#x", i, len(payload), c)
		}
	}
}

func TestEveryFlippedBitOfABlockIsFound(t *testing.T) {
	file, _, _, _ := made(3)
	block, err := Open(bytes.Clone(file))
	if err != nil {
		t.Fatal(err)
	}
	headerEnd := preambleBytes + int(binary.LittleEndian.Uint32(file[12:]))
	used := func(i int) bool {
		if i < headerEnd {
			return true
		}
		return slices.ContainsFunc(block.Header.Segments, func(s *tierpb.Segment) bool {
			at := i - block.base - int(s.Offset)
			return at >= 0 && at < int(s.StoredBytes)
		})
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
	file, ns, key, tokens := made(8)
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
	plain := headerOf(testLayers, ns, Key(ns), 0, tokens, nil)
	payload := madeblock.Payload(plain, segmentByte)
	var crcs []uint32
	for _, s := range plain.Segments {
		crcs = append(crcs, s.Crc32C)
	}
	for _, c := range []struct {
		fingerprint []byte
		right       bool
	}{{FingerprintOf(crcs), true}, {FingerprintOf(append([]uint32{1}, crcs[1:]...)), false}, {nil, true}} {
		h := headerOf(testLayers, ns, Key(ns), 0, tokens, c.fingerprint)
		h.Segments = plain.Segments
		if _, err := Open(madeblock.File(h, payload)); (err == nil) != c.right {
			t.Errorf("fingerprint %x: %v", c.fingerprint, err)
		}
	}
}
