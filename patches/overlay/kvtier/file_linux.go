package kvtier

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
)

// openShare is the part, one in so many, of the descriptors this process may have that open blocks may take: the runner's
// connections and libraries need some, too.
const openShare = 4

var (
	openFiles atomic.Int64

	mostOpen = sync.OnceValue(func() int64 {
		var limit syscall.Rlimit
		if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
			return 0
		}
		return int64(min(limit.Cur, math.MaxInt32)) / openShare
	})
)

// File is a block file that is read: in memory of its own, or open, with its bytes where the sidecar keeps them.
type File struct {
	Data []byte // nil if it is only open
	fd   *os.File
	size int
}

// WriteFile fills a file of that size, which the sidecar reserved, from offset on. Writing takes a third of what filling a mapping
// does: tmpfs need not clear pages that are written whole, and there are no page faults.
func WriteFile(path string, size, offset int, data []byte) error {
	fd, err := openBlock(path, size, os.O_WRONLY)
	if err != nil {
		return err
	}
	_, err = fd.WriteAt(data, int64(offset))
	return errors.Join(err, fd.Close())
}

// OpenFile opens a block file that lies in memory already (tmpfs), for ReadSegment. It is not mapped: the page table of a
// mapping takes as long to fill, and to empty, as the bytes take to copy, and a file that somebody cuts short ends a read, where
// it is a signal to whom has mapped it. Pages that were swapped out come back here, not where the bytes are used. ErrManyOpen:
// no more descriptors are to be spent on blocks.
func OpenFile(path string, size int) (*File, error) {
	if openFiles.Add(1) > mostOpen() {
		openFiles.Add(-1)
		return nil, ErrManyOpen
	}
	fd, err := openBlock(path, size, os.O_RDONLY)
	if err != nil {
		openFiles.Add(-1)
		return nil, err
	}
	f := &File{fd: fd, size: size}
	if err := f.bringIn(); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// bringIn reads the file once if not all of it is in memory.
func (f *File) bringIn() error {
	if resident(f.fd, f.size) {
		return nil
	}
	part := make([]byte, min(f.size, 256<<10))
	for at := 0; at < f.size; at += len(part) {
		if err := f.readAt([][]byte{part[:min(len(part), f.size-at)]}, at); err != nil {
			return err
		}
	}
	return nil
}

// ReadFile reads a block file that lies on a disk, past the page cache where the file system can: a restore of gigabytes
// must not push out what is used again, first of all the model's weights. A mapping would do that too, and turn a read
// error of the disk into a signal.
func ReadFile(path string, size int) (*File, error) {
	data, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("memory for %s: %w", path, err)
	}
	f := &File{Data: data}
	// The memory is page-aligned and a block file whole pages long, as direct reads want it.
	err = readInto(data, path, os.O_RDONLY|syscall.O_DIRECT)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EOPNOTSUPP) {
		err = readInto(data, path, os.O_RDONLY) // tmpfs, some FUSE file systems
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func readInto(data []byte, path string, mode int) error {
	fd, err := openBlock(path, len(data), mode)
	if err != nil {
		return err
	}
	defer fd.Close()
	_, err = fd.ReadAt(data, 0)
	return err
}

// Close gives the memory, or the descriptor, back.
func (f *File) Close() {
	switch {
	case f == nil:
	case f.Data != nil:
		_ = syscall.Munmap(f.Data)
		f.Data = nil
	case f.fd != nil:
		_ = f.fd.Close()
		openFiles.Add(-1)
		f.fd = nil
	}
}

func openBlock(path string, size, mode int) (*os.File, error) {
	// Not blocking: opening a FIFO would wait for its other end.
	fd, err := os.OpenFile(path, mode|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := fd.Stat()
	if err == nil {
		err = ours(path, info)
	}
	if err == nil && (!info.Mode().IsRegular() || info.Size() != int64(size)) {
		err = fmt.Errorf("%w: %s has %d bytes, not %d", ErrCorrupt, path, info.Size(), size)
	}
	if err != nil {
		fd.Close()
		return nil, err
	}
	return fd, nil
}

// ours refuses a file that is not this user's, or that others may write: they could have forged it. It is what the sidecar and
// llama-server ask of a file, too. Root may be who the sidecar is, but what it stores nobody else can read.
func ours(path string, info os.FileInfo) error {
	if !ownedAlone(info) {
		return fmt.Errorf("%w: %s is not ours alone", ErrCorrupt, path)
	}
	return nil
}

// ownedAlone reports whether a file or a directory is this user's, and nobody else may write to it.
func ownedAlone(info os.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Geteuid() && info.Mode().Perm()&0o022 == 0
}
