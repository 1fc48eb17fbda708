package kvtier

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// AvailableMemory returns how many bytes of memory could be used before something is pushed out or killed: what the kernel
// says of the machine, or less where a control group of this process, or one around it, leaves less. 0 when nothing can be said.
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
		number, rest, _ := strings.Cut(strings.TrimSuffix(string(line), "\n"), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		switch {
		case number == "0" && controllers == "":
			available = unified.least(filepath.Join(root, "sys/fs/cgroup"), path, available)
		case slices.Contains(strings.Split(controllers, ","), "memory"):
			available = perController.least(filepath.Join(root, "sys/fs/cgroup/memory"), path, available)
		}
	}
	return available
}

// hierarchy names the files of control groups of one version. What its groups use includes files in memory (tmpfs), which nothing
// but their removal gives back. Pages of other files, mapped weights among them, are given up before anything is killed.
type hierarchy struct {
	limits  []string
	current string
	files   []string // fields of memory.stat: pages that can be given up, of the group and those in it
}

var (
	unified       = hierarchy{[]string{"memory.high", "memory.max"}, "memory.current", []string{"inactive_file", "active_file"}}
	perController = hierarchy{[]string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", []string{"total_inactive_file", "total_active_file"}}
)

// least is the smallest of available and what a group below a mount leaves, and every one around it. In a container the mount is
// often that of its own group, while the path is that which the host sees: then the mount's root alone is found.
func (h hierarchy) least(mount, path string, available int) int {
	for path = filepath.Clean("/" + path); ; path = filepath.Dir(path) {
		available = min(available, h.left(filepath.Join(mount, path), available))
		if path == "/" {
			return available
		}
	}
}

// left is what one control group leaves, or unlimited where it has no limit.
func (h hierarchy) left(group string, unlimited int) int {
	left := unlimited
	current, known := memoryNumber(filepath.Join(group, h.current))
	for _, name := range h.limits {
		limit, ok := memoryNumber(filepath.Join(group, name))
		if !ok || !known {
			continue
		}
		for _, field := range h.files {
			limit += memoryField(filepath.Join(group, "memory.stat"), field)
		}
		left = min(left, limit-current)
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
