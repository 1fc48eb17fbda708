package kvtier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
)

// target is what gRPC takes for the sidecar's address. A socket's path is no URI: it may have a % or a # in it, and bytes that
// are no UTF-8. So it goes to the dialer alone, as it is.
const target = "passthrough:///sidecar"

// errStranger says that the program behind a socket is another user's.
var errStranger = errors.New("another user listens")

// dialer returns what connects to a Unix socket. Whoever listens there would see every prompt, and say which rows are restored,
// so it is asked who that is before a byte is sent.
func dialer(socket string) func(context.Context, string) (net.Conn, error) {
	var said atomic.Bool
	return func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", address(socket))
		if err != nil {
			return nil, err
		}
		uid, err := listens(conn)
		if err == nil && !trusted(uid) {
			err = fmt.Errorf("%w: %s, uid %d", errStranger, socket, uid)
			if !said.Swap(true) {
				slog.Warn("kv tiering: another user listens on the sidecar's socket, going on without it; start a sidecar of your "+
					"own and let OLLAMA_KV_TIER_SOCKET name its socket", "socket", socket, "uid", uid)
			}
		}
		if err != nil {
			conn.Close()
			return nil, err
		}
		said.Store(false)
		return conn, nil
	}
}

// trusted are this process's user and root.
func trusted(uid int) bool { return uid == os.Geteuid() || uid == 0 }

// address is a path as package net takes it: there a leading @ stands for a name that is no file's.
func address(path string) string {
	if strings.HasPrefix(path, "@") {
		return "./" + path
	}
	return path
}
