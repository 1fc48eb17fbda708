package kvtier

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

// mostParts is how many pieces of memory one call of the system fills (IOV_MAX).
const mostParts = 1024

// readAt fills parts, one after the other, with the bytes of an open file from an offset on. A file that ends before is damaged.
func (f *File) readAt(parts [][]byte, offset int) error {
	left := make([]syscall.Iovec, 0, len(parts))
	for _, part := range parts {
		if len(part) > 0 {
			v := syscall.Iovec{Base: &part[0]}
			v.SetLen(len(part))
			left = append(left, v)
		}
	}
	for len(left) > 0 {
		n, err := preadv(f.fd, left[:min(len(left), mostParts)], offset)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("read %s: %w", f.fd.Name(), err)
		case n == 0:
			return fmt.Errorf("%w: %s ends at %d", ErrCorrupt, f.fd.Name(), offset)
		}
		offset += n
		for n > 0 && n >= int(left[0].Len) {
			n -= int(left[0].Len)
			left = left[1:]
		}
		if n > 0 {
			left[0].Base = (*byte)(unsafe.Add(unsafe.Pointer(left[0].Base), n))
			left[0].SetLen(int(left[0].Len) - n)
		}
	}
	runtime.KeepAlive(parts)
	return nil
}

// ReadAt implements io.ReaderAt for an open file.
func (f *File) ReadAt(dst []byte, offset int64) (int, error) {
	if err := f.readAt([][]byte{dst}, int(offset)); err != nil {
		return 0, err
	}
	return len(dst), nil
}

func preadv(fd *os.File, parts []syscall.Iovec, offset int) (int, error) {
	n, _, errno := syscall.Syscall6(
		syscall.SYS_PREADV, fd.Fd(), uintptr(unsafe.Pointer(&parts[0])), uintptr(len(parts)), uintptr(offset), 0, 0)
	runtime.KeepAlive(fd)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
