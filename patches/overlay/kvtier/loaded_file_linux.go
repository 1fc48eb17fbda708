package kvtier

import "syscall"

// look takes the numbers of what the path leads to now.
func (f *LoadedFile) look() error {
	var info syscall.Stat_t
	if err := syscall.Stat(f.Path, &info); err != nil {
		return err
	}
	f.Device, f.Inode, f.Size = uint64(info.Dev), info.Ino, uint64(info.Size)
	f.Mtime, f.Ctime = info.Mtim.Nano(), info.Ctim.Nano()
	return nil
}
