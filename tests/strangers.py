"""Another user's process that listens on a socket, or stands for one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@contextlib.contextmanager
def listening_as(uid: int, path: Path) -> Iterator[Path]:
    """A process of that user listens on `path` and writes down, in the file that is given, what it
    is sent. The test is skipped where this user may not become another.
    """
    if os.geteuid():
        pytest.skip("only root can become another user")
    heard = path.with_name(path.name + ".heard")
    heard.touch()
    os.chown(heard, uid, uid)
    os.chown(path.parent, uid, uid)
    pid = os.fork()
    if not pid:
        try:
            _listen(uid, path, heard)
        finally:
            os._exit(1)
    try:
        end = time.monotonic() + 20
        while not path.is_socket():
            assert time.monotonic() < end
            time.sleep(0.01)
        yield heard
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def all_heard(path: Path, heard: Path) -> bytes:
    """What was sent before this call: the process takes one connection after the other."""
    mark = b"mark"
    with socket.socket(socket.AF_UNIX) as last:
        last.connect(str(path))
        last.sendall(mark)
    end = time.monotonic() + 20
    while not heard.read_bytes().endswith(mark):
        assert time.monotonic() < end
        time.sleep(0.01)
    return heard.read_bytes().removesuffix(mark)


def _listen(uid: int, path: Path, heard: Path) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path.with_name("s~")))
        path.with_name("s~").chmod(0o666)
        listener.listen()
        path.with_name("s~").rename(path)
        while True:
            client, _ = listener.accept()
            client.settimeout(1)
            with client, heard.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while data := client.recv(1 << 16):
                    file.write(data)


def pretend_strangers_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens is another user, as far as the system says; and this is not root, whose
    listeners everybody trusts.
    """
    own = os.geteuid() or 1000
    monkeypatch.setattr(os, "geteuid", lambda: own)
    monkeypatch.setattr("ollama_tiering.system.listener.peer_uid", lambda _: own + 1)
