package kvtier

import (
	"encoding/binary"
	"slices"
	"testing"
)

func note(name string, kind uint32, content string) (bytes []byte) {
	padded := func(text string) []byte { return append([]byte(text), make([]byte, (4-len(text)%4)%4)...) }
	for _, number := range []uint32{uint32(len(name)), uint32(len(content)), kind} {
		bytes = binary.NativeEndian.AppendUint32(bytes, number)
	}
	return append(append(bytes, padded(name)...), padded(content)...)
}

// built is a library whose linker says what it was built from.
func built(path, from string) LoadedObject {
	notes := append(note("Linux", 257, "x"), note("GNU\x00", 3, from)...)
	return LoadedObject{Path: path, Notes: [][]byte{note("GNU\x00", 1, "abi!"), notes}, Code: [][]byte{[]byte("code")}}
}

func TestALibraryOfAnyNameCounts(t *testing.T) {
	ours := []LoadedObject{{Code: [][]byte{[]byte("the program")}}, built("/lib/libm.so.6", "2.36"), built("/lib/libssl.so.3", "1")}
	without := Libraries(ours)
	for _, name := range []string{
		"/opt/amd/amdvlk64.so", "/lib/libLLVM-15.so.1", "/lib/libgallium-25.0.so", "/lib/libvulkan_lvp.so", "/lib/libamd_comgr.so.2",
		"/lib/libhsa-runtime64.so.1", "/lib/libigc.so.2", "/lib/libcublas.so.12", "/lib/libnvidia-glvkspirv.so.1", "/tmp/driver", "/lib/libc.so.6",
	} {
		old, updated := Libraries(append(slices.Clone(ours), built(name, "1"))), Libraries(append(slices.Clone(ours), built(name, "2")))
		if old == without || updated == without || old == updated {
			t.Errorf("%s: %s without it, %s with it, %s with another one", name, without, old, updated)
		}
	}
	for _, name := range []string{"/lib/libssl.so.3", "/lib/libnss_dns.so.2", "linux-vdso.so.1", "/lib/libX11.so.6", "/l/libggml-cuda-tiering.so"} {
		if got := Libraries(append(slices.Clone(ours), built(name, "2"))); got != without {
			t.Errorf("%s computes nothing, and rows are not found any more", name)
		}
	}
}

func TestWhereLibrariesLieAndInWhichOrderSaysNothing(t *testing.T) {
	one := []LoadedObject{built("/a/libggml-base.so", "1"), built("/a/libm.so.6", "2")}
	other := []LoadedObject{built("/b/libm.so.6", "2"), {}, built("/b/libggml-base.so", "1")}
	if Libraries(one) != Libraries(other) {
		t.Error("the same libraries are two")
	}
}

func TestALibraryWithoutABuildIsKnownByItsCode(t *testing.T) {
	seen := map[string]string{}
	for _, code := range []string{"one", "two", "longer"} {
		object := built("/lib/amdvlk64.so", "1")
		object.Notes, object.Code = object.Notes[:1], [][]byte{[]byte("head"), []byte(code)}
		got := Libraries([]LoadedObject{object})
		if other, known := seen[got]; known {
			t.Errorf("%q is taken for %q", code, other)
		}
		seen[got] = code
	}
}

func TestNotesThatEndTooEarlyHaveNoBuild(t *testing.T) {
	notes := note("GNU\x00", 3, "0123456789")
	if id := buildID(notes[:len(notes)-2]); string(id) != "0123456789" { // the padding is lacking
		t.Errorf("%q", id)
	}
	for end := range len(notes) - 2 {
		if id := buildID(notes[:end]); id != nil {
			t.Errorf("of %d bytes: %q", end, id)
		}
	}
}
