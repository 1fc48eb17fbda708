"""The image of packaging/docker as a container, without Docker: what `scripts/containers` unpacked
runs with the image's own entry point, variables and health check, as process 1.

Mounts, processes and network are its own, its root is read-only, and it has no capability. The
network has nothing but loopback, so the test's calls go in through a thread of that namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_UNSHARE = ("unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child")
_READY_SECONDS = 120.0
Value = TypeVar("Value")


class Image:
    def __init__(self, folder: Path) -> None:
        self.root = (folder / "root").resolve()
        self.says: dict[str, Any] = json.loads((folder / "image.json").read_text())

    @property
    def environment(self) -> list[str]:
        """The image's, and that what is stored is restored, however small the model."""
        return [*self.says["Env"], "OLLAMA_KV_TIER_GATE=restore"]

    @property
    def command(self) -> list[str]:
        return [*self.says["Entrypoint"], *self.says["Cmd"]]

    @property
    def health(self) -> list[str]:
        kind, *words = self.says["Healthcheck"]["Test"]
        assert kind == "CMD"
        return words


class Box:
    """`volumes`: a folder of the machine for each path in the container."""

    def __init__(
        self, image: Image, log: Path, volumes: dict[str, Path], *, user: int, shm_mib: int
    ) -> None:
        self.image = image
        self.log = log
        self.volumes = volumes
        self.user = user
        self.shm_mib = shm_mib
        self._started: subprocess.Popen[bytes] | None = None

    def entering(self, *command: str) -> list[str]:
        """How the command is run on the machine."""
        return [*command]

    def start(self, *options: str) -> list[str]:
        """Returns what it has said when it is ready. `options` come after the image's command."""
        root = self.image.root
        devices = [f"touch dev/{name}; mount --bind /dev/{name} dev/{name}" for name in _DEVICES]
        binds = [
            f"mount --bind '{there}' '{root}{path}'" for path, there in sorted(self.volumes.items())
        ]
        lines = [
            "set -e; mount --make-rprivate /",
            f"mount --bind '{root}' '{root}'; cd '{root}'",
            "mount -t proc proc proc; mount --rbind /sys sys",
            "mount -t tmpfs -o mode=755 dev dev; mkdir dev/shm; ln -s /proc/self/fd dev/fd",
            *devices,
            f"mount -t tmpfs -o mode=1777,size={self.shm_mib}m shm dev/shm",
            "mount -t tmpfs -o mode=1777 tmp tmp",
            *binds,
            "mount -o remount,bind,ro .; ip link set lo up",
            'exec chroot . /usr/bin/env -i "$@"',
        ]
        words = [*self.image.environment, *self._as_user(), *self.image.command, *options]
        with self.log.open("ab") as sink:
            self._started = subprocess.Popen(
                self.entering(*_UNSHARE, "bash", "-c", "\n".join(lines), "box", *words),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        before = len(self.log.read_text().splitlines())
        end = time.monotonic() + _READY_SECONDS
        while "  stop  " not in "\n".join(self.said()[before:]):
            assert self._started.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return self.said()[before:]

    def said(self) -> list[str]:
        return self.log.read_text().splitlines()

    def _as_user(self) -> list[str]:
        own = (f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups")
        return ["setpriv", *own, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]

    @property
    def first(self) -> psutil.Process:
        """Its process 1, seen from the machine."""
        assert self._started is not None
        return psutil.Process(self._started.pid).children()[0]

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """As `docker exec` does, as the container's user."""
        enter = ("nsenter", "-t", str(self.first.pid), "-m", "-p", "-n", "-i", "-r", "-w")
        words = ["/usr/bin/env", "-i", *self.image.environment, *self._as_user(), *command]
        return subprocess.run(
            [*enter, *words], capture_output=True, text=True, timeout=120, check=False
        )

    def inside(self, call: Callable[[], Value]) -> Value:
        """Calls it in a thread that has the container's network."""

        def enter() -> Value:
            with Path(f"/proc/{self.first.pid}/ns/net").open() as network:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(network.fileno(), _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), "setns")
            return call()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(enter).result()

    def stop(self, seconds: float) -> int:
        """As `docker stop`: the exit code; AssertionError where it would have been killed."""
        assert self._started is not None
        self.first.send_signal(signal.SIGTERM)
        try:
            return self._started.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {seconds} s") from None
        finally:
            self.end()

    def end(self) -> None:
        """At once, with all that is in it."""
        if self._started is not None and self._started.poll() is None:
            for child in psutil.Process(self._started.pid).children():
                child.kill()
            self._started.kill()
            self._started.wait()


def owners(folder: Path) -> set[int]:
    """The users to whom something below the folder belongs."""
    return {os.lstat(path).st_uid for path in folder.rglob("*")}
