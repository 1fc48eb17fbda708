package kvtier

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
)

// File is the memory of a block file that is read: mapped, or memory of its own.
type File struct {
	Data []byte
}

// WriteFile fills a file that the sidecar reserved. Writing takes a third of what filling a mapping does: tmpfs need not
// clear pages that are written whole, and there are no page faults.
func WriteFile(path string, data []byte) error {
	fd, err := openBlock(path, len(data), os.O_WRONLY)
	if err != nil {
		return err
	}
	_, err = fd.WriteAt(data, 0)
	return errors.Join(err, fd.Close())
}

// MapForRead maps a block file that lies in memory already (tmpfs), and touches its pages: Linux maps sixteen at a fault, half
// the time that MAP_POPULATE takes, which looks up each page by itself. A page that was swapped out comes back here, not
// where the bytes are used.
func MapForRead(path string, size int) (*File, error) {
	fd, err := openBlock(path, size, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer fd.Close()
	data, err := syscall.Mmap(int(fd.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	f, present := &File{Data: data}, false
	defer func() {
		if !present { // a file that was cut short faults, which may be a panic
			f.Close()
		}
	}()
	var touched byte
	for i := 0; i < len(data); i += alignment {
		touched += data[i]
	}
	runtime.KeepAlive(touched)
	present = true
	return f, nil
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

// Close gives the memory back.
func (f *File) Close() {
	if f != nil && f.Data != nil {
		_ = syscall.Munmap(f.Data)
		f.Data = nil
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

// ours refuses a file that does not belong to whom its directory does (the sidecar's user, who has checked that), or that
// others may write: they could have forged it.
func ours(path string, info os.FileInfo) error {
	dir, err := os.Stat(filepath.Dir(path))
	if err != nil {
		return err
	}
	file, ok := info.Sys().(*syscall.Stat_t)
	above, known := dir.Sys().(*syscall.Stat_t)
	if !ok || !known || file.Uid != above.Uid || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%w: %s is not ours alone", ErrCorrupt, path)
	}
	return nil
}
