package kvtier

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// machine makes a root directory of the files that say how much memory there is.
func machine(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, content := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestAvailableMemoryIsTheLeastThatAnybodyLeaves(t *testing.T) {
	const meminfo = "MemTotal:  2000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB\n"
	const whole = 1000 << 10
	for name, c := range map[string]struct {
		files map[string]string
		want  int
	}{
		"nothing is known": {nil, 0},
		"no groups":        {map[string]string{"proc/meminfo": meminfo}, whole},
		"groups of version 1, no limit": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "12:cpu,cpuacct:/a\n4:memory:/a\n1:name=systemd:/a\n0::/a\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "5\n",
		}, whole},
		"own group of version 1, less what it and those in it can give up": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/a/b\n",
			"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "900\n", "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "700\n",
			"sys/fs/cgroup/memory/a/b/memory.stat": "inactive_file 1\nactive_file 2\ntotal_inactive_file 60\ntotal_active_file 40\n",
		}, 300},
		"the group around that of version 1": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "9:hugetlb,memory:/a/b/c\n",
			"sys/fs/cgroup/memory/a/b/c/memory.limit_in_bytes": "900\n", "sys/fs/cgroup/memory/a/b/c/memory.usage_in_bytes": "10\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "500\n", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "430\n",
		}, 70},
		"a container's root of version 1, by the host's path": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/docker/0123\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "900\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "100\n",
		}, 800},
		"two versions side by side": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/a\n0::/a\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "900\n", "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "100\n",
			"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "1\n",
		}, 800},
		"memory.high of a group far above": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b/c/d\n",
			"sys/fs/cgroup/a/b/c/d/memory.max": "800\n", "sys/fs/cgroup/a/b/c/d/memory.current": "100\n",
			"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.high": "400\n", "sys/fs/cgroup/a/memory.current": "150\n",
		}, 250},
		"files in memory are in use": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a\n",
			"sys/fs/cgroup/a/memory.max": "900\n", "sys/fs/cgroup/a/memory.current": "700\n",
			"sys/fs/cgroup/a/memory.stat": "file 400\nshmem 390\ninactive_anon 390\ninactive_file 6\nactive_file 4\n",
		}, 210},
		"a path that leads out": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/../a: b\n",
			"sys/fs/cgroup/a: b/memory.max": "900\n", "sys/fs/cgroup/a: b/memory.current": "100\n",
		}, 800},
		"no limit": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "5\n",
		}, whole},
		"own group, less what it can give up": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "900\n", "sys/fs/cgroup/a/b/memory.current": "700\n",
			"sys/fs/cgroup/a/b/memory.stat": "anon 600\ninactive_file 60\nactive_file 40\n",
		}, 300},
		"the group around it": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "900\n", "sys/fs/cgroup/a/b/memory.current": "100\n",
			"sys/fs/cgroup/a/memory.high": "500\n", "sys/fs/cgroup/a/memory.current": "450\n",
		}, 50},
		"a container's root": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "900\n", "sys/fs/cgroup/memory.current": "100\n",
		}, 800},
		"more in use than allowed": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.high": "900\n", "sys/fs/cgroup/memory.current": "1000\n",
		}, 0},
	} {
		if got := availableMemory(machine(t, c.files)); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
	if AvailableMemory() < 1<<20 {
		t.Errorf("%d bytes available here", AvailableMemory())
	}
}

func TestLimitsOfContainersAreAskedInBothVersions(t *testing.T) {
	const mb = 1_000_000
	const meminfo = "MemAvailable: 32000000 kB\n"
	for _, limit := range []int{220 * mb, 500 * mb, 1000 * mb} {
		for version, files := range map[string]map[string]string{
			"2": {
				"proc/self/cgroup":                   "0::/\n",
				"sys/fs/cgroup/memory.max":           fmt.Sprintln(limit),
				"sys/fs/cgroup/memory.current":       fmt.Sprintln(180 * mb),
				"sys/fs/cgroup/memory.stat":          fmt.Sprintf("shmem %d\ninactive_file %d\nactive_file %d\n", 50*mb, 20*mb, 10*mb),
				"sys/fs/cgroup/memory.swap.max":      "0\n",
				"sys/fs/cgroup/inner/memory.current": "1\n",
			},
			"1": {
				"proc/self/cgroup":                           "4:memory:/docker/0123\n",
				"sys/fs/cgroup/memory/memory.limit_in_bytes": fmt.Sprintln(limit),
				"sys/fs/cgroup/memory/memory.usage_in_bytes": fmt.Sprintln(180 * mb),
				"sys/fs/cgroup/memory/memory.stat":           fmt.Sprintf("total_inactive_file %d\ntotal_active_file %d\n", 20*mb, 10*mb),
			},
		} {
			files["proc/meminfo"] = meminfo
			if got, want := availableMemory(machine(t, files)), limit-150*mb; got != want {
				t.Errorf("version %s, %d bytes: %d available, want %d", version, limit, got, want)
			}
		}
	}
}

func TestAClosedFileGivesItsMemoryBack(t *testing.T) {
	const size = 64 << 20
	path := filepath.Join(t.TempDir(), "block")
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	anonymous := func() int { return memoryField("/proc/self/status", "RssAnon:") << 10 }
	before := anonymous()
	f, err := ReadFile(path, size)
	if err != nil {
		t.Fatal(err)
	}
	during := anonymous()
	f.Close()
	if after := anonymous(); during-before < size/2 || during-after < size/2 {
		t.Errorf("%d bytes before, %d while it was open, %d after", before, during, after)
	}
}
