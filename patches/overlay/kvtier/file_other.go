//go:build !linux

package kvtier

import "errors"

// File is the memory of a block file. The tiers are on Linux only; elsewhere every block is a miss.
type File struct {
	Data []byte
}

var errNotHere = errors.New("kv tiering needs Linux")

func WriteFile(string, []byte) error { return errNotHere }

func MapForRead(string, int) (*File, error) { return nil, errNotHere }

func ReadFile(string, int) (*File, error) { return nil, errNotHere }

func (f *File) Close() {}

// AvailableMemory returns 0: nothing is read here.
func AvailableMemory() int { return 0 }
