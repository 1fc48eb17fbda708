package kvtier

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"hash/crc32"
	"strings"

	"github.com/ollama/ollama/kvtier/tierpb"
)

// Key names a block: a digest of everything its K/V depends on.
type Key [sha256.Size]byte

// Namespace is the digest of all that changes the meaning of K/V bytes but is not a token.
type Namespace = Key

// Layer is the geometry of one layer of one cache child.
type Layer struct {
	Child, Layer                int
	Kind                        string // full, swa, chunked
	Window                      int
	KVHeads, KHeadDim, VHeadDim int
	KRowBytes, VRowBytes        int // of one position's row; what the cache's type makes of heads and dimensions
}

// RowBytes is the size of one position's row of K or V.
func (l Layer) RowBytes(v bool) int {
	if v {
		return l.VRowBytes
	}
	return l.KRowBytes
}

// Description lists what a namespace is the digest of; docs/format.md has the meaning of every field.
type Description struct {
	Model          string
	Adapters       []string
	Engine         string
	CacheDType     string
	Layers         []Layer
	FlashAttention bool
	Extra          string
}

// Proto returns the fields in the order in which they are hashed.
func (d Description) Proto() *tierpb.Namespace {
	layers := make([]string, len(d.Layers))
	for i, l := range d.Layers {
		layers[i] = fmt.Sprintf("%d:%d:%s:%d:%d:%d:%d", l.Child, l.Layer, l.Kind, l.Window, l.KVHeads, l.KHeadDim, l.VHeadDim)
	}
	flash := "off"
	if d.FlashAttention {
		flash = "on"
	}
	fields := [][2]string{
		{"format", fmt.Sprint(FormatVersion)},
		{"model", d.Model},
		{"adapters", strings.Join(d.Adapters, ",")},
		{"engine", d.Engine},
		{"cache_dtype", d.CacheDType},
		{"layers", strings.Join(layers, ";")},
		{"flash_attention", flash},
		{"block_tokens", fmt.Sprint(BlockTokens)},
		{"extra", d.Extra},
	}
	ns := &tierpb.Namespace{}
	for _, f := range fields {
		ns.Fields = append(ns.Fields, &tierpb.NamespaceField{Name: f[0], Value: f[1]})
	}
	return ns
}

// NamespaceOf returns the digest of a description.
func NamespaceOf(d *tierpb.Namespace) Namespace {
	h := sha256.New()
	writePrefixed(h, []byte("kvt-namespace-1"))
	for _, f := range d.Fields {
		writePrefixed(h, []byte(f.Name))
		writePrefixed(h, []byte(f.Value))
	}
	return Namespace(h.Sum(nil))
}

// Extra is what else than a token stands at a row, such as an image. Rows count from the start of a block, or of a prompt.
type Extra struct {
	Row    uint32
	Digest []byte
}

// ExtrasOf are those of so many rows from first on, counted from there.
func ExtrasOf(extras []Extra, first, rows int) (inside []Extra) {
	for _, x := range extras {
		if at := int(x.Row) - first; at >= 0 && at < rows {
			inside = append(inside, Extra{Row: uint32(at), Digest: x.Digest})
		}
	}
	return inside
}

// FingerprintOf tells rows of the same tokens apart, by the CRC-32C of every segment.
func FingerprintOf(crcs []uint32) []byte {
	all := crcBytes(crcs)
	first := binary.LittleEndian.AppendUint32(nil, crc32.Checksum(all, castagnoli))
	return binary.LittleEndian.AppendUint32(first, crc32.ChecksumIEEE(all))
}

func crcBytes(crcs []uint32) (all []byte) {
	for _, crc := range crcs {
		all = binary.LittleEndian.AppendUint32(all, crc)
	}
	return all
}

// BlockKey returns the key of the block that holds tokens and follows parent. fingerprint is that of its rows, where tokens do not
// decide their bits. Keys are made by the sidecar: here it is seen that a file is the block that was asked for.
func BlockKey(parent Key, tokens []byte, extras []Extra, fingerprint []byte) Key {
	var e []byte
	for _, x := range extras {
		e = binary.LittleEndian.AppendUint32(e, x.Row)
		e = binary.LittleEndian.AppendUint32(e, uint32(len(x.Digest)))
		e = append(e, x.Digest...)
	}
	h := sha256.New()
	writePrefixed(h, []byte("kvt1"))
	writePrefixed(h, parent[:])
	writePrefixed(h, tokens)
	writePrefixed(h, e)
	if len(fingerprint) > 0 {
		writePrefixed(h, fingerprint)
	}
	return Key(h.Sum(nil))
}

// TokenBytes encodes token ids as they are hashed and stored: int32, little endian.
func TokenBytes(tokens []int32) []byte {
	b := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	return b
}

// Chain returns the keys of the whole blocks of a prompt's tokens (as TokenBytes encodes them) and extras, first to last.
func Chain(ns Namespace, tokens []byte, extras []Extra) []Key {
	const size = 4 * BlockTokens
	keys := make([]Key, 0, len(tokens)/size)
	parent := Key(ns)
	for i := 0; i+size <= len(tokens); i += size {
		parent = BlockKey(parent, tokens[i:i+size], ExtrasOf(extras, i/4, BlockTokens), nil)
		keys = append(keys, parent)
	}
	return keys
}

func writePrefixed(h hash.Hash, b []byte) {
	var n [4]byte
	binary.LittleEndian.PutUint32(n[:], uint32(len(b)))
	h.Write(n[:])
	h.Write(b)
}
