package kvtier

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/ollama/ollama/kvtier/madeblock"
	"github.com/ollama/ollama/kvtier/tierpb"
)

type vectorSegment struct {
	Child, Layer uint32
	Kind, Dtype  string
	RowBytes     uint32 `json:"row_bytes"`
	Offset       uint64
	StoredBytes  uint64 `json:"stored_bytes"`
	CRC32C       uint32
	SHA256       string
}

type vectorBlock struct {
	File, Expect, Why      string
	Namespace, Key, Parent string
	FirstPosition          int `json:"first_position"`
	Tokens                 []int32
	Extras                 []vectorExtra
	Cells                  []uint32
	Window                 []string
	Created                int64 `json:"created_unix_seconds"`
	Segments               []vectorSegment
}

func TestBlockFilesAreReadAsTheGoldenVectorsSay(t *testing.T) {
	var v struct{ Blocks []vectorBlock }
	dir := vectors(t, "blocks.json", &v)
	if len(v.Blocks) == 0 {
		t.Fatal("no blocks in the vectors")
	}
	wantErr := map[string]error{
		"ok": nil, "corrupt-header": ErrCorrupt, "corrupt-payload": ErrCorrupt,
		"unsupported": ErrFormat, "encoded": ErrFormat, "encoded-corrupt": ErrFormat,
	}
	for _, want := range v.Blocks {
		t.Run(want.File, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join(dir, "blocks", want.File))
			if err != nil {
				t.Fatal(err)
			}
			expected, known := wantErr[want.Expect]
			if !known {
				t.Fatalf("%q says nothing here", want.Expect)
			}
			b, err := Open(data)
			if err == nil {
				if want.Expect != "ok" && want.Expect != "corrupt-payload" {
					t.Errorf("opened: %s", want.Why)
				} else {
					compareHeader(t, b, want)
				}
				err = b.Verify()
			}
			if !errors.Is(err, expected) {
				t.Errorf("%s: got %v, want %v", want.Why, err, expected)
			}
		})
	}
}

func compareHeader(t *testing.T, b *Block, want vectorBlock) {
	t.Helper()
	h := b.Header
	for what, pair := range map[string][2]string{
		"namespace": {hex.EncodeToString(h.Namespace), want.Namespace}, "key": {hex.EncodeToString(h.Key), want.Key},
		"parent": {hex.EncodeToString(h.Parent), want.Parent},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s %s, want %s", what, pair[0], pair[1])
		}
	}
	if int(h.FirstPosition) != want.FirstPosition || h.CreatedUnixSeconds != want.Created || !slices.Equal(h.Tokens, TokenBytes(want.Tokens)) {
		t.Errorf("position %d, time %d, %d bytes of tokens", h.FirstPosition, h.CreatedUnixSeconds, len(h.Tokens))
	}
	sameExtra := func(x *tierpb.Extra, y vectorExtra) bool {
		return int(x.Row) == y.Row && hex.EncodeToString(x.Digest) == y.Digest
	}
	if !slices.EqualFunc(h.Extras, want.Extras, sameExtra) {
		t.Errorf("extras %v, want %v", h.Extras, want.Extras)
	}
	sameKey := func(x []byte, y string) bool { return hex.EncodeToString(x) == y }
	if !slices.Equal(h.Cells, want.Cells) || !slices.EqualFunc(h.Window, want.Window, sameKey) {
		t.Errorf("cells %v, window of %d", h.Cells, len(h.Window))
	}
	if len(h.Segments) != len(want.Segments) {
		t.Fatalf("%d segments, want %d", len(h.Segments), len(want.Segments))
	}
	for i, s := range h.Segments {
		w := want.Segments[i]
		kind := tierpb.SegmentKind(tierpb.SegmentKind_value["SEGMENT_KIND_"+w.Kind])
		if s.Child != w.Child || s.Layer != w.Layer || s.Kind != kind || s.Dtype != w.Dtype || s.RowBytes != w.RowBytes ||
			s.Offset != w.Offset || s.StoredBytes != w.StoredBytes || s.Crc32C != w.CRC32C {
			t.Errorf("segment %d is %v, want %v", i, s, w)
		}
		digest := sha256.Sum256(b.Segment(i))
		if want.Expect == "ok" && hex.EncodeToString(digest[:]) != w.SHA256 {
			t.Errorf("segment %d has other bytes", i)
		}
	}
}

// The limits that no committed file is large enough to break alone.
func TestAHeaderLargerThanItsLimitsIsRefused(t *testing.T) {
	for name, layers := range map[string]int{"as many segments as may be": maxSegments / 2, "two more": maxSegments/2 + 1} {
		h := headerOf(manyLayers(layers), Namespace{1}, Key{1}, 0, TokenBytes([]int32{1}), nil)
		_, err := Open(madeblock.File(h, madeblock.Payload(h, segmentByte)))
		if want := map[bool]error{true: ErrCorrupt}[2*layers > maxSegments]; !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	for name, length := range map[string]int{"as long as may be": 0, "a byte longer": 1} {
		file := withHeaderOf(t, maxHeaderBytes+length)
		_, err := Open(file)
		if want := map[bool]error{true: ErrCorrupt}[length > 0]; !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
}

func manyLayers(n int) (layers []Layer) {
	for i := range n {
		layers = append(layers, Layer{Layer: i, Kind: "full", KVHeads: 1, KHeadDim: 1, VHeadDim: 1, KRowBytes: 1, VRowBytes: 1})
	}
	return layers
}

// withHeaderOf returns a block file whose header has so many bytes: a field that nobody knows fills it.
func withHeaderOf(t *testing.T, length int) []byte {
	t.Helper()
	h := headerOf(testLayers, Namespace{1}, Key{1}, 0, TokenBytes([]int32{1}), nil)
	payload := madeblock.Payload(h, segmentByte)
	const unknown = 1000
	fill := length - proto.Size(h) - protowire.SizeTag(unknown)
	fill -= protowire.SizeBytes(fill) - fill // its length takes bytes, too
	h.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, unknown, protowire.BytesType), make([]byte, fill)))
	if got := proto.Size(h); got != length {
		t.Fatalf("a header of %d bytes, want %d", got, length)
	}
	return madeblock.File(h, payload)
}
