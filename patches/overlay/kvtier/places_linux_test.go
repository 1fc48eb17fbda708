package kvtier

import (
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"testing"
)

func TestTheRuntimeDirectoryOfAnotherUserIsNotUsed(t *testing.T) {
	runtime, state := t.TempDir(), t.TempDir()
	t.Setenv("XDG_STATE_HOME", state)
	own := filepath.Join(runtime, "ollama-tiering", "sidecar.sock")
	other := filepath.Join(state, "ollama-tiering", "run", "sidecar.sock")
	says := func(what, dir, want string) {
		t.Helper()
		t.Setenv("XDG_RUNTIME_DIR", dir)
		if got := defaultSocket(); got != want {
			t.Errorf("%s: %s", what, got)
		}
	}
	for mode, want := range map[os.FileMode]string{0o700: own, 0o755: own, 0o770: other, 0o777: other, 0o720: other} {
		if err := os.Chmod(runtime, mode); err != nil {
			t.Fatal(err)
		}
		says(mode.String(), runtime, want)
	}
	if err := os.Chmod(runtime, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(runtime, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	says("none", "", other)
	says("a file", file, other)
	says("nothing there", filepath.Join(runtime, "none"), other)
	t.Chdir(filepath.Dir(runtime))
	says("relative", filepath.Base(runtime), other)
	if os.Geteuid() != 0 {
		t.Skip("only root can make a directory another user's")
	}
	if err := os.Chown(runtime, stranger, -1); err != nil {
		t.Fatal(err)
	}
	says("another user's", runtime, other)
}

func TestADirectoryThatGoesWithTheSessionIsTakenOnlyWhereASidecarListensInIt(t *testing.T) {
	dir := shortDir(t)
	who, err := user.LookupId(strconv.Itoa(os.Geteuid()))
	if err != nil {
		t.Skip(err)
	}
	before, lingers := logind, lingering
	t.Cleanup(func() { logind, lingering = before, lingers })
	logind, lingering = dir, filepath.Join(dir, "linger")
	runtime := filepath.Join(dir, strconv.Itoa(os.Geteuid()))
	inRuntime, inState := filepath.Join(runtime, socketName), filepath.Join(dir, "ollama-tiering", "run", "sidecar.sock")
	for _, folder := range []string{lingering, filepath.Dir(inRuntime), filepath.Dir(inState)} {
		if err := os.MkdirAll(folder, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("XDG_STATE_HOME", dir)
	t.Setenv("XDG_RUNTIME_DIR", runtime)
	says := func(what, want string) {
		t.Helper()
		if got := defaultSocket(); got != want {
			t.Errorf("%s: %s", what, got)
		}
	}
	says("nobody listens", inState)
	listener, err := net.Listen("unix", inRuntime)
	if err != nil {
		t.Fatal(err)
	}
	says("a sidecar listens in the other place", inRuntime)
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	listener.Close()
	says("nobody listens there any more", inState)
	flag := filepath.Join(lingering, who.Username)
	if err := os.WriteFile(flag, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	says("the user lingers", inRuntime)
}
