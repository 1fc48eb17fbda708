//go:build !amd64

package kvtier

import "hash/crc32"

var canFold = false

func updateCRC(crc uint32, data []byte) uint32 { return crc32.Update(crc, castagnoli, data) }
