package kvtier

import (
	"bytes"
	"errors"
	"math/rand"
	"sync"
	"syscall"
	"testing"
	"time"
)

// shared returns memory that is not the Go heap's, as a mapped file is, with the given content.
func shared(t *testing.T, content []byte) []byte {
	t.Helper()
	data, err := syscall.Mmap(-1, 0, len(content), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(data) })
	copy(data, content)
	return data
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

func TestCopiedSegmentsAreTheStoredOnesAndDamageIsFound(t *testing.T) {
	file, l, _, _, _ := sealed(t, 64)
	b, err := Open(file)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range l.Segments {
		dst := bytes.Repeat([]byte{0xa5}, s.Bytes+8)
		if err := b.CopySegment(dst, i); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(dst[:s.Bytes], file[s.Offset:s.Offset+s.Bytes]) || !bytes.Equal(dst[s.Bytes:], bytes.Repeat([]byte{0xa5}, 8)) {
			t.Errorf("segment %d was copied wrong", i)
		}
		for _, at := range []int{0, s.Bytes / 2, s.Bytes - 1} {
			file[s.Offset+at] ^= 4
			if err := b.CopySegment(dst, i); !errors.Is(err, ErrCorrupt) {
				t.Errorf("segment %d, byte %d: %v", i, at, err)
			}
			file[s.Offset+at] ^= 4
		}
	}
}

// The source changes while it is copied, by the copying itself: what is checked has to be the copy.
func TestWhatIsCheckedIsTheCopyNotTheSource(t *testing.T) {
	// segments of 128 KiB
	layers := []Layer{{Layer: 0, Kind: "full", KVHeads: 8, KHeadDim: 128, VHeadDim: 128, KRowBytes: 2048, VRowBytes: 2048}}
	l := NewLayout(layers, 64, 0)
	file := make([]byte, l.FileBytes)
	rand.New(rand.NewSource(1)).Read(file)
	ns := NamespaceOf(Description{Model: "m", Layers: layers}.Proto())
	tokens := TokenBytes(make([]int32, 64))
	if err := l.Seal(file, ns, BlockKey(ns, tokens, nil), ns, 0, tokens, nil, "f16"); err != nil {
		t.Fatal(err)
	}
	b, err := Open(file)
	if err != nil {
		t.Fatal(err)
	}
	s := l.Segments[1]
	want := bytes.Clone(b.Segment(1))
	dst := file[s.Offset-64 : s.Offset-64+s.Bytes]
	if err := b.CopySegment(dst, 1); err != nil {
		t.Errorf("the copy was right, yet: %v", err)
	}
	if !bytes.Equal(dst, want) || bytes.Equal(b.Segment(1), want) {
		t.Error("the test is wrong: the source should have changed, not the copy")
	}
}

func TestACopyBesideAVandalIsRightOrRefused(t *testing.T) {
	sealedFile, l, _, _, _ := sealed(t, 64)
	file := shared(t, sealedFile)
	b, err := Open(file)
	if err != nil {
		t.Fatal(err)
	}
	s := l.Segments[2]
	want, dst := bytes.Clone(b.Segment(2)), make([]byte, s.Bytes)
	defer vandal(file, s.Offset+s.Bytes/2)()
	right, refused := 0, 0
	for end := time.Now().Add(10 * time.Second); (right < 100 || refused < 100) && time.Now().Before(end); {
		switch err := b.CopySegment(dst, 2); {
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

func TestAHeaderIsReadOnceAlsoBesideAVandal(t *testing.T) {
	sealedFile, _, ns, _, _ := sealed(t, 64)
	file := shared(t, sealedFile)
	at := bytes.Index(file, ns[:])
	defer vandal(file, at+31)()
	right, refused := 0, 0
	for end := time.Now().Add(10 * time.Second); (right < 100 || refused < 100) && time.Now().Before(end); {
		if b, err := Open(file); err == nil {
			if !bytes.Equal(b.Header.Namespace, ns[:]) {
				t.Fatal("a changed byte of the header went through")
			}
			right++
		} else {
			refused++
		}
	}
	if right == 0 || refused == 0 {
		t.Errorf("%d right, %d refused: nothing was shown", right, refused)
	}
}
