package kvtier

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// check refuses a header whose numbers do not fit the file or each other, or whose key is not that of its tokens. The sidecar
// refuses the same; the files of tests/vectors that both must refuse are wrong in one thing each.
func (b *Block) check() error {
	h := b.Header
	if len(h.Namespace) != len(Key{}) || len(h.Parent) != len(Key{}) || len(h.Key) != len(Key{}) {
		return fmt.Errorf("%w: key, parent or namespace of another length", ErrCorrupt)
	}
	rows := len(h.Tokens) / 4
	if len(h.Tokens)%4 != 0 || rows < 1 || rows > maxRows {
		return fmt.Errorf("%w: %d bytes of tokens", ErrCorrupt, len(h.Tokens))
	}
	if err := checkExtras(h.Extras, rows); err != nil {
		return err
	}
	if err := checkWindow(h, rows); err != nil {
		return err
	}
	if err := b.checkSegments(rows); err != nil {
		return err
	}
	if key := BlockKey(Key(h.Parent), h.Tokens, b.extras(), h.Fingerprint); !bytes.Equal(key[:], h.Key) {
		return fmt.Errorf("%w: its key is not that of its tokens", ErrCorrupt)
	}
	return b.checkRows()
}

// checkRows wants the rows that the key names, if it names any. What is read must still be compared with the checksums.
func (b *Block) checkRows() error {
	if len(b.Header.Fingerprint) == 0 {
		return nil
	}
	crcs := make([]uint32, len(b.Header.Segments))
	for i, s := range b.Header.Segments {
		crcs[i] = s.Crc32C
	}
	if !bytes.Equal(FingerprintOf(crcs), b.Header.Fingerprint) {
		return fmt.Errorf("%w: its rows are those of another history", ErrCorrupt)
	}
	return nil
}

// checkExtras wants them in the order of their rows, which the block has.
func checkExtras(extras []*tierpb.Extra, rows int) error {
	least := uint32(0)
	for _, x := range extras {
		if x.Row < least || int(x.Row) >= rows {
			return fmt.Errorf("%w: extra at row %d of %d", ErrCorrupt, x.Row, rows)
		}
		least = x.Row
	}
	return nil
}

// checkWindow wants a cell for each row, or none, and keys where there are cells only.
func checkWindow(h *tierpb.BlockHeader, rows int) error {
	if len(h.Cells) > 0 && len(h.Cells) != rows {
		return fmt.Errorf("%w: %d cells of %d rows", ErrCorrupt, len(h.Cells), rows)
	}
	if len(h.Cells) == 0 && len(h.Window) > 0 {
		return fmt.Errorf("%w: blocks of a window, and no cells", ErrCorrupt)
	}
	if slices.ContainsFunc(h.Window, func(key []byte) bool { return len(key) != len(Key{}) }) {
		return fmt.Errorf("%w: a key of a window's block of another length", ErrCorrupt)
	}
	return nil
}

// checkSegments wants raw K and V in order, each as long as so many rows, one after the other to the end of the file.
func (b *Block) checkSegments(rows int) error {
	segments := b.Header.Segments
	if len(segments) < 1 || len(segments) > maxSegments {
		return fmt.Errorf("%w: %d segments", ErrCorrupt, len(segments))
	}
	for i, s := range segments {
		if s.Encoding != tierpb.Encoding_ENCODING_RAW {
			return fmt.Errorf("%w: segment %d has encoding %v", ErrFormat, i, s.Encoding)
		}
	}
	room, end := uint64(b.size-b.base), uint64(0)
	for i, s := range segments {
		if s.Kind != tierpb.SegmentKind_SEGMENT_KIND_K && s.Kind != tierpb.SegmentKind_SEGMENT_KIND_V {
			return fmt.Errorf("%w: segment %d is neither K nor V", ErrCorrupt, i)
		}
		if i > 0 && !before(segments[i-1], s) {
			return fmt.Errorf("%w: segment %d is out of order", ErrCorrupt, i)
		}
		if s.Offset%alignment != 0 || s.Offset < end || s.StoredBytes == 0 || s.StoredBytes != uint64(rows)*uint64(s.RowBytes) ||
			s.StoredBytes > room || s.Offset > room-s.StoredBytes {
			return fmt.Errorf("%w: segment %d at %d, %d bytes, file of %d", ErrCorrupt, i, s.Offset, s.StoredBytes, b.size)
		}
		end = s.Offset + s.StoredBytes
	}
	if uint64(alignUp(int(end))) != room {
		return fmt.Errorf("%w: segments end at %d, file of %d", ErrCorrupt, b.base+int(end), b.size)
	}
	return nil
}

func before(a, b *tierpb.Segment) bool {
	return cmp.Or(cmp.Compare(a.Child, b.Child), cmp.Compare(a.Layer, b.Layer), cmp.Compare(a.Kind, b.Kind)) < 0
}
