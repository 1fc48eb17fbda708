package kvtier

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const testBlob = "sha256-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// blob is a file as one that was there long before this process.
func blob(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), testBlob)
	if err := os.WriteFile(path, []byte("weights"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := startedAt
	t.Cleanup(func() { startedAt = before })
	startedAt = time.Now().Add(time.Hour).UnixNano()
	return path
}

func TestAFileIsKnownByWhatNobodyCanPutBack(t *testing.T) {
	path := blob(t)
	before, reason := LoadedBlobs(path)
	if reason != "" || len(before) != 1 || before[0].Size != 7 || before[0].Path != path {
		t.Fatalf("%v: %s", before, reason)
	}
	then := time.Unix(0, before[0].Mtime)
	time.Sleep(20 * time.Millisecond) // the clock of times of change goes by ticks
	if err := os.WriteFile(path, []byte("weighty"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, then, then); err != nil {
		t.Fatal(err)
	}
	after, _ := LoadedBlobs(path)
	if after[0].Mtime != before[0].Mtime || after[0] == before[0] {
		t.Errorf("%v and %v", before, after)
	}
}

func TestAFileThatChangesWhileItIsLoadedIsNotTiered(t *testing.T) {
	path := blob(t)
	startedAt = time.Now().Add(-time.Hour).UnixNano()
	if _, reason := LoadedBlobs(path); !strings.Contains(reason, "changed while it was loaded") {
		t.Errorf("a file that is newer than the process: %q", reason)
	}
	startedAt = time.Now().Add(time.Hour).UnixNano()
	before := startedWith
	defer func() { startedWith = before }()
	startedWith, _ = LookAt(path)
	if _, reason := LoadedBlobs(path); reason != "" {
		t.Error(reason)
	}
	startedWith.Inode++
	if _, reason := LoadedBlobs(path); !strings.Contains(reason, "changed while it was loaded") {
		t.Errorf("another file than the one the process was started for: %q", reason)
	}
}

func TestOnlyNamesThatAreDigestsSayWhatIsInAFile(t *testing.T) {
	path := blob(t)
	other := filepath.Join(filepath.Dir(path), "model.gguf")
	if err := os.Rename(path, other); err != nil {
		t.Fatal(err)
	}
	for _, paths := range [][]string{{other}, {path + "0"}, {path}} {
		if files, reason := LoadedBlobs(paths...); reason == "" {
			t.Errorf("%v", files)
		}
	}
}

func TestTheModelOfARunnerIsInItsArguments(t *testing.T) {
	path := blob(t)
	want, _ := LookAt(path)
	for _, args := range [][]string{
		{"runner", "--ollama-engine", "--model", path, "--port", "1"}, {"runner", "-model", path}, {"runner", "--model=" + path},
	} {
		if got := modelOf(args); got != want {
			t.Errorf("%v: %v", args, got)
		}
	}
	for _, args := range [][]string{nil, {"serve"}, {"runner", "--model"}} {
		if got := modelOf(args); got != (LoadedFile{}) && got.Inode != 0 {
			t.Errorf("%v: %v", args, got)
		}
	}
}
