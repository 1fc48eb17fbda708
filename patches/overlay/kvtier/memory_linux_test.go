package kvtier

import (
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
		"nothing is known":    {nil, 0},
		"no groups":           {map[string]string{"proc/meminfo": meminfo}, whole},
		"groups of version 1": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/a\n"}, whole},
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
