package kvtier

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"unsafe"
)

// residentPages counts the pages of a file that are in the page cache.
func residentPages(t *testing.T, path string, size int) int {
	t.Helper()
	fd, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	data, err := syscall.Mmap(int(fd.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Munmap(data) }()
	pages := make([]byte, size/alignment)
	if _, _, errno := syscall.Syscall(syscall.SYS_MINCORE, uintptr(unsafe.Pointer(&data[0])), uintptr(size), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		t.Fatal(errno)
	}
	n := 0
	for _, p := range pages {
		n += int(p & 1)
	}
	return n
}

func TestReadFileReadsWhatIsThereAndLeavesThePageCacheAlone(t *testing.T) {
	const size = 1 << 20
	want := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	dirs := map[string]string{"disk": t.TempDir()}
	if shm, err := os.MkdirTemp("/dev/shm", "kvtier-test-"); err == nil {
		defer os.RemoveAll(shm)
		dirs["tmpfs"] = shm
	}
	for name, dir := range dirs {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, "block")
			fd, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := fd.Write(want); err != nil {
				t.Fatal(err)
			}
			if err := fd.Sync(); err != nil {
				t.Fatal(err)
			}
			// Dropped from the cache, as after a restart; on tmpfs this does nothing.
			if _, _, errno := syscall.Syscall6(syscall.SYS_FADVISE64, fd.Fd(), 0, 0, 4, 0, 0); errno != 0 {
				t.Fatal(errno)
			}
			fd.Close()
			before := residentPages(t, path, size)
			f, err := ReadFile(path, size)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if !bytes.Equal(f.Data, want) {
				t.Error("read other bytes than were written")
			}
			// A file system that refuses direct reads (an overlay, some network ones) may fill the cache.
			direct, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECT, 0)
			if err != nil {
				t.Skipf("no direct reads here: %v", err)
			}
			direct.Close()
			if after := residentPages(t, path, size); name == "disk" && after > before {
				t.Errorf("%d pages in the cache after the read, %d before", after, before)
			}
		})
	}
}

func TestReadFileRefusesAnotherSizeALinkAndWhatIsNotThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "block")
	if err := os.WriteFile(path, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFile(path, 4096); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a longer file: %v", err)
	}
	if _, err := ReadFile(path, 12288); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a shorter file: %v", err)
	}
	if err := os.Symlink(path, path+".link"); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFile(path+".link", 8192); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a link: %v", err)
	}
	if _, err := ReadFile(path+".none", 8192); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing there: %v", err)
	}
}

func TestWriteFileFillsAReservedFileAndNothingElse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "block")
	if err := os.WriteFile(path, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("0123456789abcdef"), 512)
	if err := WriteFile(path, 8192, 4096, want[4096:]); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got[4096:], want[4096:]) || slices.Max(got[:4096]) > 0 {
		t.Errorf("other bytes than were written: %v", err)
	}
	if err := WriteFile(path, 4096, 0, want[:4096]); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a file of another size: %v", err)
	}
	if err := os.Symlink(path, path+".link"); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path+".link", 8192, 0, want); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a link: %v", err)
	}
	if err := WriteFile(path+".none", 8192, 0, want); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing there: %v", err)
	}
}

func TestFilesThatOthersOwnOrMayWriteAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "block")
	if err := os.WriteFile(path, make([]byte, 4096), 0o400); err != nil {
		t.Fatal(err)
	}
	opens := map[string]func() error{
		"open":  func() error { f, err := OpenFile(path, 4096); f.Close(); return err },
		"read":  func() error { _, err := ReadFile(path, 4096); return err },
		"write": func() error { return WriteFile(path, 4096, 0, make([]byte, 4096)) },
	}
	for name, open := range opens {
		if err := os.Chmod(path, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := open(); err != nil {
			t.Fatalf("%s of a file of our own: %v", name, err)
		}
		for _, mode := range []os.FileMode{0o620, 0o602, 0o666} {
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
			if err := open(); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s with mode %o: %v", name, mode, err)
			}
		}
		if os.Geteuid() != 0 {
			continue // making one of another user needs root
		}
		if err := errors.Join(os.Chmod(path, 0o600), os.Chown(path, 65534, -1)); err != nil {
			t.Fatal(err)
		}
		if err := open(); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("%s of another user's file: %v", name, err)
		}
		// Whoever has the directory may put anything there, so that it says nothing of a file in it.
		if err := os.Chown(filepath.Dir(path), stranger, -1); err != nil {
			t.Fatal(err)
		}
		if err := open(); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("%s of another user's file in that user's directory: %v", name, err)
		}
		if err := errors.Join(os.Chown(path, 0, -1), os.Chown(filepath.Dir(path), 0, -1)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOpenedFilesAreInMemoryAndNoMoreThanMayBe(t *testing.T) {
	const size = 1 << 20
	path := filepath.Join(t.TempDir(), "block")
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	if err := fd.Sync(); err != nil {
		t.Fatal(err)
	}
	if _, _, errno := syscall.Syscall6(syscall.SYS_FADVISE64, fd.Fd(), 0, 0, 4, 0, 0); errno != 0 {
		t.Fatal(errno)
	}
	if residentPages(t, path, size) == size/alignment {
		t.Skip("this file system does not let go of pages")
	}
	asked := map[string]func(*os.File, int) (bool, error){"cachestat": cached, "mincore": inCore}
	for name, all := range asked {
		if got, err := all(fd, size); got {
			t.Errorf("%s: pages that are on the disk are thought to be in memory (%v)", name, err)
		}
	}
	if resident(fd, size) {
		t.Error("pages that are on the disk are thought to be in memory")
	}
	limit := mostOpen
	defer func() { mostOpen = limit }()
	mostOpen = func() int64 { return 2 }
	var files []*File
	for range 2 {
		f, err := OpenFile(path, size)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	if got := residentPages(t, path, size); got != size/alignment {
		t.Errorf("%d of %d pages are in memory", got, size/alignment)
	}
	for name, all := range asked {
		if got, err := all(fd, size); !got && !errors.Is(err, syscall.ENOSYS) && !errors.Is(err, syscall.EPERM) {
			t.Errorf("%s: pages are in memory, and it says no (%v)", name, err)
		}
	}
	for range 3 {
		if _, err := OpenFile(path, size); !errors.Is(err, ErrManyOpen) {
			t.Fatalf("a third file: %v", err)
		}
	}
	files[0].Close()
	files[0].Close() // counts once
	for range 3 {
		if _, err := OpenFile(path+".none", size); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("nothing there: %v", err)
		}
	}
	f, err := OpenFile(path, size)
	if err != nil {
		t.Fatalf("after one was closed: %v", err)
	}
	if _, err := OpenFile(path, size); !errors.Is(err, ErrManyOpen) {
		t.Errorf("one that was closed twice counts twice: %v", err)
	}
	f.Close()
	files[1].Close()
	if n := openFiles.Load(); n != 0 {
		t.Errorf("%d files are thought to be open", n)
	}
}
