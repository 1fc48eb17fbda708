package kvtier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/ollama/ollama/kvtier/tierpb"
)

const stranger = 65534

// lines are the log's, for tests that count them.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) with(part string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}

func logged(t *testing.T) *lines {
	t.Helper()
	l, before := &lines{}, slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(l, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	return l
}

// shortDir returns a directory that a socket's path has room for, and where anybody may make one.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return dir
}

// listenAs listens as another user, which needs root: for one thread only.
func listenAs(t *testing.T, uid int, socket string) net.Listener {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can listen as another user")
	}
	become := func(euid int) {
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), uintptr(euid), ^uintptr(0)); errno != 0 {
			t.Fatal(errno)
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	become(uid)
	listener, err := net.Listen("unix", socket)
	become(0)
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

func serve(t *testing.T, listener net.Listener) *grpc.Server {
	t.Helper()
	return serveAs(t, listener, oneBlockSidecar{})
}

func serveAs(t *testing.T, listener net.Listener, sidecar tierpb.BlockStoreServer) *grpc.Server {
	t.Helper()
	server := grpc.NewServer()
	tierpb.RegisterBlockStoreServer(server, sidecar)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return server
}

// comesUp waits until a client has had an answer.
func comesUp(t *testing.T, c *Client) bool {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !c.Up(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

func TestAnotherUsersSidecarIsSentNothingAndTheOwnOneIsFoundLater(t *testing.T) {
	said, socket := logged(t), filepath.Join(shortDir(t), "s")
	listener := listenAs(t, stranger, socket)
	var connected, heard atomic.Int64
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			n, _ := conn.Read(make([]byte, 64))
			heard.Add(int64(n))
			connected.Add(1)
			conn.Close()
		}
	}()
	c, err := NewClient(socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for deadline := time.Now().Add(10 * time.Second); connected.Load() < 3; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("only %d connections were tried", connected.Load())
		}
	}
	if c.Up() || heard.Load() > 0 {
		t.Errorf("up %v, and the stranger has heard %d bytes", c.Up(), heard.Load())
	}
	if n := said.with("another user listens"); n != 1 {
		t.Errorf("%d log lines say so", n)
	}
	if n := said.with(fmt.Sprint("uid=", stranger)); n != 1 {
		t.Errorf("%d log lines say who it is", n)
	}
	listener.Close()
	listener, err = net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, listener)
	if !comesUp(t, c) {
		t.Error("the sidecar of this user is not found")
	}
}

func TestRootIsNoStranger(t *testing.T) {
	for uid, want := range map[int]bool{0: true, os.Geteuid(): true, stranger: os.Geteuid() == stranger} {
		if trusted(uid) != want {
			t.Errorf("uid %d: trusted %v", uid, !want)
		}
	}
}

func TestASocketMayHaveAnyNameThatAFileMayHave(t *testing.T) {
	dir := shortDir(t)
	t.Chdir(dir)
	t.Setenv("OLLAMA_KV_TIERING", "1")
	for i, name := range []string{
		"plain", "100%", "%41", "a%zz", "%2F", "a#b", "#", "a?b=1", "?", "a b", " a", "a ", "it's'", `"quoted"`, `back\slash`, "a:b",
		"[::1]:80", "a@b", "@a", "~a", "$HOME", "a;b&c", "é", "\xff\xfe", "new\nline", "tab\t", "unix:a", "-a", "*",
	} {
		folder := filepath.Join(dir, fmt.Sprint(i), name)
		if err := os.MkdirAll(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		socket := filepath.Join(folder, name)
		listener, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		server := serve(t, listener)
		t.Setenv("OLLAMA_KV_TIER_SOCKET", socket)
		for how, env := range map[string]string{"path": socket, "unix:path": "unix:" + socket, "unix://path": "unix://" + socket} {
			t.Setenv("OLLAMA_KV_TIER_SOCKET", env)
			config, _ := FromEnv()
			if how != "path" && strings.Trim(name, " \t\n'\"") != name {
				continue // a value that is no path is trimmed, as Ollama trims its own
			}
			if config.Socket != socket {
				t.Errorf("%s: %q became %q", how, env, config.Socket)
			}
		}
		c, err := NewClient(socket, nil)
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		if !comesUp(t, c) {
			t.Errorf("%q: nothing answers there", name)
		}
		c.Close()
		server.Stop()
	}
	// Relative to the directory of the process: "@" stands for an abstract name elsewhere.
	listener, err := net.Listen("unix", "./@s")
	if err != nil {
		t.Fatal(err)
	}
	serve(t, listener)
	conn, err := dialer("@s")(context.Background(), "")
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestWhatListensIsAskedOfTheConnectionNotOfTheSocketsFile(t *testing.T) {
	socket := filepath.Join(shortDir(t), "s")
	listener := listenAs(t, stranger, socket)
	defer listener.Close()
	if err := os.Chown(socket, 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := dialer(socket)(context.Background(), ""); !errors.Is(err, errStranger) {
		t.Errorf("%v", err)
	}
}
