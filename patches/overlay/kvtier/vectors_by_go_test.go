package kvtier

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

type vectorLayer struct {
	Child, Layer int
	Kind         string
	Window       int
	KRowBytes    int `json:"k_row_bytes"`
	VRowBytes    int `json:"v_row_bytes"`
}

type vectorToWrite struct {
	File, Namespace, Parent, Dtype string
	FirstPosition                  int `json:"first_position"`
	Tokens                         []int32
	Extras                         []vectorExtra
	Layers                         []vectorLayer
	Window                         *struct {
		Child, First, Position int
		Cells                  []int32
		Last                   bool
		Others                 []string
	}
}

// What Go writes is committed beside what it was told to, and pytest reads that. KVTIER_WRITE_VECTORS=1 writes it anew.
func TestBlockFilesAreWrittenAsTheCommittedOnes(t *testing.T) {
	var v struct {
		Created int64 `json:"created_unix_seconds"`
		Blocks  []vectorToWrite
	}
	dir := vectors(t, "by_go.json", &v)
	if len(v.Blocks) == 0 {
		t.Fatal("nothing to write")
	}
	now = func() time.Time { return time.Unix(v.Created, 0) }
	t.Cleanup(func() { now = time.Now })
	for _, told := range v.Blocks {
		file := write(t, told)
		path := filepath.Join(dir, "by_go", told.File)
		if os.Getenv("KVTIER_WRITE_VECTORS") == "1" {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, file, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		committed, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(file, committed) {
			t.Errorf("%s is written otherwise", told.File)
		}
	}
}

func write(t *testing.T, told vectorToWrite) []byte {
	t.Helper()
	var layers []Layer
	for _, l := range told.Layers {
		layers = append(layers, Layer{Child: l.Child, Layer: l.Layer, Kind: l.Kind, Window: l.Window, KRowBytes: l.KRowBytes, VRowBytes: l.VRowBytes})
	}
	ns, parent, tokens := Namespace(unhex(t, told.Namespace)), Key(unhex(t, told.Parent)), TokenBytes(told.Tokens)
	if w := told.Window; w != nil {
		block := WindowBlock{
			On: parent, Child: w.Child, First: w.First, Position: w.Position, Tokens: tokens, Cells: w.Cells, Last: w.Last,
		}
		for _, other := range w.Others {
			block.Others = append(block.Others, Key(unhex(t, other)))
		}
		l := NewWindowLayout(layers, len(told.Tokens), len(block.Others))
		file := filled(l)
		if err := l.SealWindow(file, ns, block, told.Dtype); err != nil {
			t.Fatal(err)
		}
		return file
	}
	var extras []Extra
	for _, x := range told.Extras {
		extras = append(extras, Extra{Row: uint32(x.Row), Digest: unhex(t, x.Digest)})
	}
	l := NewLayout(layers, len(told.Tokens), len(extras))
	file := filled(l)
	if err := l.Seal(file, ns, BlockKey(parent, tokens, extras), parent, told.FirstPosition, tokens, extras, told.Dtype); err != nil {
		t.Fatal(err)
	}
	return file
}

// filled has the bytes that by_go.json says in its segments, and something else elsewhere.
func filled(l *Layout) []byte {
	file := bytes.Repeat([]byte{0xa5}, l.FileBytes)
	for i, s := range l.Segments {
		for at := range s.Bytes {
			file[s.Offset+at] = byte(31*i + 7*at + at/251)
		}
	}
	return file
}

// withHeaderOf returns a block file whose header has so many bytes: a field that nobody knows fills it.
func withHeaderOf(t *testing.T, length int) []byte {
	t.Helper()
	file, l, _, _, _ := sealed(t, 1)
	old := file[preambleBytes : preambleBytes+int(binary.LittleEndian.Uint32(file[12:]))]
	const unknown = 1000
	fill := length - len(old) - protowire.SizeTag(unknown)
	fill -= protowire.SizeBytes(fill) - fill // its length takes bytes, too
	header := protowire.AppendBytes(protowire.AppendTag(bytes.Clone(old), unknown, protowire.BytesType), make([]byte, fill))
	if len(header) != length {
		t.Fatalf("a header of %d bytes, want %d", len(header), length)
	}
	base := alignUp(preambleBytes + len(header))
	made := make([]byte, base, base+len(file))
	copy(made, file[:preambleBytes])
	copy(made[preambleBytes:], header)
	binary.LittleEndian.PutUint32(made[12:], uint32(len(header)))
	binary.LittleEndian.PutUint64(made[16:], uint64(base))
	binary.LittleEndian.PutUint32(made[24:], crc32.Checksum(header, castagnoli))
	binary.LittleEndian.PutUint32(made[28:], crc32.Checksum(made[:28], castagnoli))
	return append(made, file[l.PayloadOffset:]...)
}
