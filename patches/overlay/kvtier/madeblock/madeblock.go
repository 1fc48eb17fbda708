// Package madeblock makes block files for tests. Those of the product are the sidecar's, which writes all but the segments.
package madeblock

import (
	"encoding/binary"
	"hash/crc32"

	"google.golang.org/protobuf/proto"

	"github.com/ollama/ollama/kvtier/tierpb"
)

const alignment = 4096

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Payload makes the segments of a header, whose tokens say how many rows they have, and completes what the header says of them.
func Payload(h *tierpb.BlockHeader, bytes func(segment, at int) byte) (payload []byte) {
	rows := uint64(len(h.Tokens) / 4)
	for i, s := range h.Segments {
		s.Encoding = tierpb.Encoding_ENCODING_RAW
		s.Offset, s.StoredBytes = uint64(len(payload)), rows*uint64(s.RowBytes)
		segment := make([]byte, alignUp(int(s.StoredBytes)))
		for at := range int(s.StoredBytes) {
			segment[at] = bytes(i, at)
		}
		s.Crc32C = crc32.Checksum(segment[:s.StoredBytes], castagnoli)
		payload = append(payload, segment...)
	}
	return payload
}

// File is a block file of a header that is complete.
func File(h *tierpb.BlockHeader, payload []byte) []byte {
	header, err := proto.Marshal(h)
	if err != nil {
		panic(err) // of a test
	}
	base := alignUp(32 + len(header))
	file := make([]byte, base, base+len(payload))
	copy(file, "KVTBLK\r\n")
	binary.LittleEndian.PutUint32(file[8:], 1) // of the format
	binary.LittleEndian.PutUint32(file[12:], uint32(len(header)))
	binary.LittleEndian.PutUint64(file[16:], uint64(base))
	binary.LittleEndian.PutUint32(file[24:], crc32.Checksum(header, castagnoli))
	binary.LittleEndian.PutUint32(file[28:], crc32.Checksum(file[:28], castagnoli))
	copy(file[32:], header)
	return append(file, payload...)
}

func alignUp(n int) int { return (n + alignment - 1) / alignment * alignment }
