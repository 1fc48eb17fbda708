package kvtier

import (
	"errors"
	"net"
	"syscall"
)

// listens returns the user whose program listens at the other end of a connection.
func listens(conn net.Conn) (uid int, err error) {
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *syscall.Ucred
	asked := raw.Control(func(fd uintptr) {
		peer, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err = errors.Join(asked, err); err != nil {
		return 0, err
	}
	return int(peer.Uid), nil
}
