package kvtier

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"runtime"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// ErrCorrupt says that stored bytes are not what was written; ErrFormat that they are of another version or shape.
var (
	ErrCorrupt = errors.New("block is damaged")
	ErrFormat  = errors.New("block is of another format")

	// ErrManyOpen says that this process has as many blocks open as it may.
	ErrManyOpen = errors.New("too many blocks are open")
)

const (
	alignment      = 4096
	preambleBytes  = 32
	maxHeaderBytes = 1 << 20
	maxRows        = 4096
	maxSegments    = 4096
)

var (
	magic      = [8]byte{'K', 'V', 'T', 'B', 'L', 'K', '\r', '\n'}
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// Layout says where the segments of a block with a given number of rows lie behind its header. It is immutable and shared by
// all blocks of the same geometry.
type Layout struct {
	Rows     int
	Bytes    int
	Segments []SegmentSpan
}

// SegmentSpan is the place of one segment: rows of RowBytes bytes, in position order.
type SegmentSpan struct {
	RowBytes int
	Offset   int
	Bytes    int
}

// NewLayout lays out the K and V segments of every layer.
func NewLayout(layers []Layer, rows int) *Layout {
	l := &Layout{Rows: rows}
	for _, layer := range layers {
		for _, v := range []bool{false, true} {
			row := layer.RowBytes(v)
			l.Segments = append(l.Segments, SegmentSpan{RowBytes: row, Offset: l.Bytes, Bytes: rows * row})
			l.Bytes = alignUp(l.Bytes + rows*row)
		}
	}
	return l
}

// Checksums returns the CRC-32C of every segment, and clears what lies between them.
func (l *Layout) Checksums(payload []byte) []uint32 {
	crcs := make([]uint32, len(l.Segments))
	for i, s := range l.Segments {
		crcs[i] = checksum(payload[s.Offset : s.Offset+s.Bytes])
		clear(payload[s.Offset+s.Bytes : alignUp(s.Offset+s.Bytes)])
	}
	return crcs
}

// SegmentsOf are the segments of layers as the sidecar wants to know them before it names blocks.
func SegmentsOf(layers []Layer, dtype string) (segments []*tierpb.Segment) {
	for _, l := range layers {
		for _, v := range []bool{false, true} {
			segments = append(segments, &tierpb.Segment{
				Child: uint32(l.Child), Layer: uint32(l.Layer), Kind: kindOf(v), Dtype: dtype, RowBytes: uint32(l.RowBytes(v)),
			})
		}
	}
	return segments
}

// Block is a block file that has been opened: header parsed and checked against the file's size, payload not yet read.
type Block struct {
	Header *tierpb.BlockHeader
	memory []byte // all of it, where it lies in memory of its own
	file   *File  // else
	base   int
	size   int
}

// Open parses the header of a block file in memory. It reads nothing of the payload.
func Open(memory []byte) (*Block, error) {
	return open(bytes.NewReader(memory), &Block{memory: memory, size: len(memory)})
}

// Block is Open for a file, in memory or not.
func (f *File) Block() (*Block, error) {
	if f.Data != nil {
		return Open(f.Data)
	}
	return open(f, &Block{file: f, size: f.size})
}

// open has all of the header copied before it checks it, and looks at the copy only: the file may change meanwhile.
func open(r io.ReaderAt, b *Block) (*Block, error) {
	if b.size < preambleBytes {
		return nil, fmt.Errorf("%w: file of %d bytes", ErrCorrupt, b.size)
	}
	preamble := make([]byte, preambleBytes)
	if _, err := r.ReadAt(preamble, 0); err != nil {
		return nil, err
	}
	if !bytes.Equal(preamble[:8], magic[:]) {
		return nil, fmt.Errorf("%w: magic %x", ErrCorrupt, preamble[:8])
	}
	if crc32.Checksum(preamble[:28], castagnoli) != binary.LittleEndian.Uint32(preamble[28:]) {
		return nil, fmt.Errorf("%w: preamble checksum", ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint32(preamble[8:]); v != FormatVersion {
		return nil, fmt.Errorf("%w: version %d", ErrFormat, v)
	}
	headerBytes := int(binary.LittleEndian.Uint32(preamble[12:]))
	base := binary.LittleEndian.Uint64(preamble[16:])
	if headerBytes > maxHeaderBytes || base > uint64(b.size) || base%alignment != 0 || uint64(preambleBytes+headerBytes) > base {
		return nil, fmt.Errorf("%w: header of %d bytes, payload at %d, file of %d", ErrCorrupt, headerBytes, base, b.size)
	}
	raw := make([]byte, headerBytes)
	if _, err := r.ReadAt(raw, preambleBytes); err != nil {
		return nil, err
	}
	if crc32.Checksum(raw, castagnoli) != binary.LittleEndian.Uint32(preamble[24:]) {
		return nil, fmt.Errorf("%w: header checksum", ErrCorrupt)
	}
	b.Header, b.base = &tierpb.BlockHeader{}, int(base)
	if err := proto.Unmarshal(raw, b.Header); err != nil {
		return nil, fmt.Errorf("%w: header: %v", ErrCorrupt, err)
	}
	return b, b.check()
}

// extras are what its header says of them.
func (b *Block) extras() []Extra {
	extras := make([]Extra, len(b.Header.Extras))
	for i, x := range b.Header.Extras {
		extras[i] = Extra{Row: x.Row, Digest: x.Digest}
	}
	return extras
}

// Matches reports why the block is not the one asked for, or nil. tokens and extras are the prompt's from the block's first
// position on; at the first rows they must be the block's.
func (b *Block) Matches(
	ns Namespace, key, parent Key, firstPosition, rows int, tokens []byte, extras []Extra, layers []Layer, dtype string,
) error {
	h := b.Header
	if !bytes.Equal(h.Namespace, ns[:]) || !bytes.Equal(h.Key, key[:]) || !bytes.Equal(h.Parent, parent[:]) || int(h.FirstPosition) != firstPosition {
		return fmt.Errorf("%w: another block (key %x, position %d)", ErrCorrupt, h.Key, h.FirstPosition)
	}
	if rows > len(h.Tokens)/4 || len(tokens) < 4*rows || !bytes.Equal(h.Tokens[:4*rows], tokens[:4*rows]) {
		return fmt.Errorf("%w: its tokens are not the prompt's", ErrCorrupt)
	}
	same := func(a, b Extra) bool { return a.Row == b.Row && bytes.Equal(a.Digest, b.Digest) }
	if !slices.EqualFunc(ExtrasOf(b.extras(), 0, rows), ExtrasOf(extras, 0, rows), same) {
		return fmt.Errorf("%w: what stands beside its tokens is not what the prompt has", ErrCorrupt)
	}
	return b.has(layers, dtype)
}

// has reports why the segments are not K and V of layers, or nil.
func (b *Block) has(layers []Layer, dtype string) error {
	h := b.Header
	if len(h.Segments) != 2*len(layers) {
		return fmt.Errorf("%w: %d segments for %d layers", ErrFormat, len(h.Segments), len(layers))
	}
	for i, s := range h.Segments {
		l, v := layers[i/2], i%2 == 1
		if int(s.Child) != l.Child || int(s.Layer) != l.Layer || s.Kind != kindOf(v) || s.Dtype != dtype || int(s.RowBytes) != l.RowBytes(v) {
			return fmt.Errorf("%w: segment %d is %v of layer %d, %d bytes a row", ErrFormat, i, s.Kind, s.Layer, s.RowBytes)
		}
	}
	return nil
}

// Segment returns the bytes of segment i of a block in memory: rows in position order.
func (b *Block) Segment(i int) []byte {
	s := b.Header.Segments[i]
	at := b.base + int(s.Offset)
	return b.memory[at : at+int(s.StoredBytes)]
}

// Verify compares every segment of a block in memory with its checksum. That says something of later reads only because
// nobody else can write that memory.
func (b *Block) Verify() error {
	for i := range b.Header.Segments {
		if err := b.compare(i, checksum(b.Segment(i))); err != nil {
			return err
		}
	}
	return nil
}

// ReadSegment reads segment i of an open file into parts, which have room for exactly that, and compares what is in them then
// with the checksum. The file may be changed by others at any time and is read once; nobody else may write parts. After an
// error there may be anything in them.
func (b *Block) ReadSegment(parts [][]byte, i int) error {
	if err := b.file.readAt(parts, b.base+int(b.Header.Segments[i].Offset)); err != nil {
		return err
	}
	var crc uint32
	for _, part := range parts { // still in the CPU's caches
		crc = updateCRC(crc, part)
	}
	return b.compare(i, crc)
}

func (b *Block) compare(i int, crc uint32) error {
	if s := b.Header.Segments[i]; crc != s.Crc32C {
		return fmt.Errorf("%w: segment %d (%v of layer %d): checksum %08x, header says %08x", ErrCorrupt, i, s.Kind, s.Layer, crc, s.Crc32C)
	}
	return nil
}

// checksum returns the CRC-32C of bytes that are in no cache of the CPU yet. The CPU's CRC instruction is used for three streams
// side by side, 1 KiB apart, which the hardware does not prefetch; asking for every line of the next few KiB first doubles the
// speed.
func checksum(data []byte) uint32 {
	if canFold { // goes straight through
		return updateCRC(0, data)
	}
	const ahead, line = 8 << 10, 64
	var crc uint32
	var touched byte
	for len(data) > 0 {
		part := data[:min(ahead, len(data))]
		for i := 0; i < len(part); i += line {
			touched += part[i]
		}
		crc = crc32.Update(crc, castagnoli, part)
		data = data[len(part):]
	}
	runtime.KeepAlive(touched)
	return crc
}

func kindOf(v bool) tierpb.SegmentKind {
	if v {
		return tierpb.SegmentKind_SEGMENT_KIND_V
	}
	return tierpb.SegmentKind_SEGMENT_KIND_K
}

func alignUp(n int) int {
	return (n + alignment - 1) / alignment * alignment
}
