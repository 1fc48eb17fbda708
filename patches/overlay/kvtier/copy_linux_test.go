package kvtier

import (
	"bytes"
	"errors"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ollama/ollama/kvtier/madeblock"
)

// span is where a segment lies in the file.
func (b *Block) span(i int) SegmentSpan {
	s := b.Header.Segments[i]
	return SegmentSpan{RowBytes: int(s.RowBytes), Offset: b.base + int(s.Offset), Bytes: int(s.StoredBytes)}
}

// onDisk returns a block file with the given content, open, and the same bytes as memory that is shared with it: what is
// changed there is changed in the file.
func onDisk(t *testing.T, content []byte) (f *File, shared []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "block")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	shared, err = syscall.Mmap(int(fd.Fd()), 0, len(content), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(shared) })
	if f, err = OpenFile(path, len(content)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f, shared
}

// vandal flips the lowest bit of a byte for as long as the test runs, until the returned function is called.
func vandal(data []byte, at int) (stop func()) {
	ended, group := make(chan struct{}), sync.WaitGroup{}
	group.Add(1)
	go func() {
		defer group.Done()
		for {
			select {
			case <-ended:
				return
			default:
				data[at] ^= 1
			}
		}
	}()
	return func() { close(ended); group.Wait() }
}

func TestReadSegmentsAreTheStoredOnesAndDamageIsFound(t *testing.T) {
	content, _, _, _ := made(64)
	f, file := onDisk(t, content)
	b, err := f.Block()
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Header.Segments {
		s := b.span(i)
		// In pieces, as rows in several runs of cells are.
		a, between, c := make([]byte, 3*s.RowBytes), []byte{}, make([]byte, s.Bytes-3*s.RowBytes)
		parts := [][]byte{a, between, c}
		if err := b.ReadSegment(parts, i); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(slices.Concat(a, c), file[s.Offset:s.Offset+s.Bytes]) {
			t.Errorf("segment %d was read wrong", i)
		}
		for _, at := range []int{0, s.Bytes / 2, s.Bytes - 1} {
			file[s.Offset+at] ^= 4
			if err := b.ReadSegment(parts, i); !errors.Is(err, ErrCorrupt) {
				t.Errorf("segment %d, byte %d: %v", i, at, err)
			}
			file[s.Offset+at] ^= 4
		}
	}
}

func TestASegmentInMorePiecesThanOneCallTakes(t *testing.T) {
	content := make([]byte, 2*mostParts+5)
	rand.New(rand.NewSource(1)).Read(content)
	f, _ := onDisk(t, content)
	got := make([]byte, len(content)-1)
	var parts [][]byte
	for i := range got {
		parts = append(parts, got[i:i+1])
	}
	if err := f.readAt(parts, 1); err != nil || !bytes.Equal(got, content[1:]) {
		t.Errorf("read wrong: %v", err)
	}
}

// The file changes while it is read, by the reading itself: what is checked has to be what was read.
func TestWhatIsCheckedIsWhatWasReadNotTheFile(t *testing.T) {
	// segments of 128 KiB
	layers := []Layer{{Layer: 0, Kind: "full", KVHeads: 8, KHeadDim: 128, VHeadDim: 128, KRowBytes: 2048, VRowBytes: 2048}}
	ns := NamespaceOf(Description{Model: "m", Layers: layers}.Proto())
	h := headerOf(layers, ns, Key(ns), 0, TokenBytes(make([]int32, 64)), nil)
	random := rand.New(rand.NewSource(1))
	content := madeblock.File(h, madeblock.Payload(h, func(int, int) byte { return byte(random.Int()) }))
	f, file := onDisk(t, content)
	b, err := f.Block()
	if err != nil {
		t.Fatal(err)
	}
	s := b.span(1)
	want := bytes.Clone(file[s.Offset : s.Offset+s.Bytes])
	dst := file[s.Offset-alignment : s.Offset-alignment+s.Bytes]
	if err := b.ReadSegment([][]byte{dst}, 1); err != nil {
		t.Errorf("what was read was right, yet: %v", err)
	}
	if !bytes.Equal(dst, want) || bytes.Equal(file[s.Offset:s.Offset+s.Bytes], want) {
		t.Error("the test is wrong: the file should have changed, not what was read")
	}
}

func TestAReadBesideAVandalIsRightOrRefused(t *testing.T) {
	content, _, _, _ := made(64)
	f, file := onDisk(t, content)
	b, err := f.Block()
	if err != nil {
		t.Fatal(err)
	}
	s := b.span(2)
	want, dst := bytes.Clone(content[s.Offset:s.Offset+s.Bytes]), make([]byte, s.Bytes)
	defer vandal(file, s.Offset+s.Bytes/2)()
	right, refused := 0, 0
	for end := time.Now().Add(10 * time.Second); (right < 100 || refused < 100) && time.Now().Before(end); {
		switch err := b.ReadSegment([][]byte{dst}, 2); {
		case err != nil:
			refused++
		case !bytes.Equal(dst, want):
			t.Fatal("a changed byte went through")
		default:
			right++
		}
	}
	if right == 0 || refused == 0 {
		t.Errorf("%d right, %d refused: nothing was shown", right, refused)
	}
}

// onceReader is a file of which no byte may be read twice: it may be another the second time.
type onceReader struct {
	t       *testing.T
	content []byte
	read    []bool
}

func (r *onceReader) ReadAt(dst []byte, offset int64) (int, error) {
	for i := range dst {
		if r.read[int(offset)+i] {
			r.t.Errorf("byte %d is read twice", int(offset)+i)
		}
		r.read[int(offset)+i] = true
	}
	return copy(dst, r.content[offset:]), nil
}

func TestNoByteOfAHeaderIsReadTwice(t *testing.T) {
	content, ns, _, _ := made(64)
	r := &onceReader{t, content, make([]bool, len(content))}
	b, err := open(r, &Block{size: len(content)})
	if err != nil || !bytes.Equal(b.Header.Namespace, ns[:]) {
		t.Fatalf("opened %+v, %v", b, err)
	}
	if at := bytes.Index(content, ns[:]); !r.read[at] || r.read[b.base] {
		t.Error("the header is to be read, and nothing of the payload")
	}
}

func TestAFileThatWasCutShortEndsTheRead(t *testing.T) {
	content, _, _, _ := made(64)
	f, _ := onDisk(t, content)
	b, err := f.Block()
	if err != nil {
		t.Fatal(err)
	}
	last := len(b.Header.Segments) - 1
	s := b.span(last)
	for _, size := range []int{s.Offset + s.Bytes - 1, s.Offset + 1, s.Offset, 100} {
		if err := os.Truncate(f.fd.Name(), int64(size)); err != nil {
			t.Fatal(err)
		}
		if err := b.ReadSegment([][]byte{make([]byte, s.Bytes)}, last); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	if _, err := f.Block(); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a header of which some is gone: %v", err)
	}
}
