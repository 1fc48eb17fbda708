package kvtier

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// AvailableMemory returns how many bytes of memory could be used before something is pushed out or killed: what the kernel
// says of the machine, or less where a control group (version 2) of this process or one around it leaves less. 0 when
// nothing can be said.
func AvailableMemory() int {
	return availableMemory("/")
}

func availableMemory(root string) int {
	available := memoryField(filepath.Join(root, "proc/meminfo"), "MemAvailable:") << 10
	groups, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return available
	}
	for line := range bytes.Lines(groups) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(string(line)), "0::"); ok {
			for ; ; path = filepath.Dir(path) {
				available = min(available, groupMemory(filepath.Join(root, "sys/fs/cgroup", path), available))
				if path == "/" || path == "." {
					break
				}
			}
		}
	}
	return available
}

// groupMemory is what one control group leaves, or unlimited where it has no limit. Pages of files, mapped weights among
// them, are given up before anything is killed.
func groupMemory(group string, unlimited int) int {
	left := unlimited
	for _, name := range []string{"memory.high", "memory.max"} {
		limit, ok := memoryNumber(filepath.Join(group, name))
		current, known := memoryNumber(filepath.Join(group, "memory.current"))
		if ok && known {
			stat := filepath.Join(group, "memory.stat")
			left = min(left, limit-current+memoryField(stat, "inactive_file")+memoryField(stat, "active_file"))
		}
	}
	return max(left, 0)
}

// memoryNumber reads a file with one number; ok is false for "max" and for a file that is not there.
func memoryNumber(path string) (n int, ok bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err = strconv.Atoi(strings.TrimSpace(string(data)))
	return n, err == nil
}

// memoryField returns the number after a name at the start of a line, 0 where there is none.
func memoryField(path, name string) int {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(data) {
		if fields := strings.Fields(string(line)); len(fields) >= 2 && fields[0] == name {
			n, _ := strconv.Atoi(fields[1])
			return n
		}
	}
	return 0
}
