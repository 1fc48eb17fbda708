package kvtier

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"slices"
	"strings"
)

// LoadedObject is a library in this process's memory, or the program, which has no Path.
type LoadedObject struct {
	Path  string
	Notes [][]byte // what its linker noted
	Code  [][]byte // its parts that nobody writes to
}

// harmlessLibraries is how the names of those begin that compute no row: the kernel's own, connections, names of hosts,
// compression, text, windows on a screen. Two that compute have a name of their own in the namespace: NVIDIA's compiler is loaded
// only where its cache lacks a kernel, and is of the same driver as libcuda; our own kernels in front of libggml-cuda are of the
// build. llama-server's tiering has the same list (llama_server/src/kvt_objects.cpp).
var harmlessLibraries = []string{
	"linux-vdso.",
	"libbrotli", "libcom_err.", "libcrypto.", "libcurl", "libgnutls.", "libgssapi", "libhogweed.", "libidn", "libk5crypto.",
	"libkeyutils.", "libkrb5", "liblber", "libldap", "libnettle.", "libnghttp", "libngtcp", "libp11-kit.", "libpsl.", "librtmp.",
	"libsasl", "libssh", "libssl.", "libtasn1.", "libunistring.",
	"libnss_", "libresolv.",
	"libbz2.", "liblz4.", "liblzma.", "libz.", "libzstd.",
	"libedit.", "libexpat.", "libicu", "libncurses", "libtinfo.", "libxml2.",
	"libX11", "libXau.", "libXdmcp.", "libXext.", "libXfixes.", "libwayland-", "libxcb", "libxshmfence.",
	"libbsd.", "libcap.", "libgcrypt.", "libgpg-error.", "libmd.", "libpciaccess.", "libpcre", "libselinux.", "libsystemd.", "libudev.",
	"libggml-cuda-tiering.", "libnvidia-ptxjitcompiler.",
}

// Libraries is the part of a namespace's `extra` of the libraries in memory: of GGML's, of what they compute with and of the
// drivers of devices. A driver that compiles its kernels may have any name, and bring a compiler: of what is not known to
// compute nothing, the bits of rows may depend on it. The program has a name of its own (Build).
func Libraries(objects []LoadedObject) string {
	var marks []string
	for _, o := range objects {
		name := filepath.Base(o.Path)
		begins := func(with string) bool { return strings.HasPrefix(name, with) }
		if o.Path != "" && !slices.ContainsFunc(harmlessLibraries, begins) {
			marks = append(marks, name+"="+o.mark()+"\n")
		}
	}
	slices.Sort(marks)
	digest := sha256.Sum256([]byte(strings.Join(marks, "")))
	return Part("libraries", hex.EncodeToString(digest[:8]))
}

// mark is what the linker says that the object was built from; where it does not, it is the checksum of its code as it is in memory:
// the file may be another one by now.
func (o LoadedObject) mark() string {
	for _, notes := range o.Notes {
		if id := buildID(notes); id != nil {
			return "id:" + hex.EncodeToString(id)
		}
	}
	crc, size := uint32(0), 0
	for _, code := range o.Code {
		crc = crc32.Update(crc, castagnoli, code)
		size += len(code)
	}
	return fmt.Sprintf("bytes:%d-%08x", size, crc)
}

// buildID is the linker's name of what it was given (NT_GNU_BUILD_ID), nil where none of the notes is that.
func buildID(notes []byte) []byte {
	const head, gnu, kind = 12, "GNU\x00", 3
	padded := func(n uint32) int { return (int(n) + 3) / 4 * 4 }
	for len(notes) >= head {
		name, content := binary.NativeEndian.Uint32(notes), binary.NativeEndian.Uint32(notes[4:])
		begin := head + padded(name)
		if begin+int(content) > len(notes) {
			return nil
		}
		if binary.NativeEndian.Uint32(notes[8:]) == kind && bytes.HasPrefix(notes[head:begin], []byte(gnu)) && name == uint32(len(gnu)) {
			return notes[begin : begin+int(content)]
		}
		notes = notes[min(begin+padded(content), len(notes)):] // the last one need not be padded
	}
	return nil
}
