package kvtier

import (
	"context"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
)

const socketName = "ollama-tiering/sidecar.sock"

var (
	logind    = "/run/user"               // has the users' runtime directories
	lingering = "/var/lib/systemd/linger" // has a file for each user whose directory outlives the sessions
)

// defaultSocket is where the sidecar listens unless it is told otherwise; or where one does that has the other place which it may
// have, as a user's service has. ollama_tiering/config/places.py says the same.
func defaultSocket() string {
	places := socketPlaces()
	isSocket := func(path string) bool {
		info, err := os.Stat(path)
		return err == nil && info.Mode().Type() == os.ModeSocket
	}
	if isSocket(places[0]) {
		return places[0]
	}
	at := slices.IndexFunc(places, func(path string) bool { return isSocket(path) && answers(path) })
	return places[max(at, 0)]
}

// socketPlaces are where a sidecar of this user's may listen, the first of them by default.
func socketPlaces() []string {
	state := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(state) { // none, as the XDG specification has it: two processes would not mean the same place
		home, _ := os.UserHomeDir()
		state = filepath.Join(home, ".local", "state")
	}
	inState := filepath.Join(state, "ollama-tiering", "run", "sidecar.sock")
	dir := os.Getenv("XDG_RUNTIME_DIR")
	switch inRuntime := filepath.Join(dir, socketName); {
	case !runtimeDirectory(dir):
		return []string{inState}
	case outlivesSessions(dir):
		return []string{inRuntime, inState}
	default:
		return []string{inState, inRuntime}
	}
}

// runtimeDirectory reports whether XDG_RUNTIME_DIR is this user's. `sudo -E` and `su` hand on another user's: who listens there
// may be a stranger.
func runtimeDirectory(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && filepath.IsAbs(dir) && info.IsDir() && ownedAlone(info)
}

// outlivesSessions: logind removes its directory at the end of the user's last session, unless the user lingers.
func outlivesSessions(dir string) bool {
	if filepath.Clean(dir) != filepath.Join(logind, strconv.Itoa(os.Geteuid())) {
		return true
	}
	who, err := user.LookupId(strconv.Itoa(os.Geteuid()))
	if err != nil {
		return false
	}
	_, err = os.Stat(filepath.Join(lingering, who.Username))
	return err == nil
}

// answers reports whether this user's or root's program listens on a socket.
func answers(socket string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), LookupTimeout)
	defer cancel()
	conn, err := dialer(socket)(ctx, "")
	if err != nil {
		return false
	}
	conn.Close()
	return true
}
