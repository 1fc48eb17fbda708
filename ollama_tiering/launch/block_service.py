"""The sidecar, for whoever starts it: asked over its socket, started in a process of its own,
stopped.

A sidecar that already answers on the socket is used and left running: we stop only what we started.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from ollama_tiering.client.channel import SidecarChannel
from ollama_tiering.config import is_socket
from ollama_tiering.errors import ServiceError, plain
from ollama_tiering.launch.process import Child, died, package_path, start, wait_ready
from ollama_tiering.launch.unharmed import in_one_line
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.system.listener import OwnListener

START_SECONDS = 60.0
STOP_SECONDS = 30.0  # more than the sidecar's own drain takes
_ASK_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 2.0
_MOST_UNANSWERED = 3
_GIVE_UP_SECONDS = 5.0
_ERROR, _HINT = "error: ", "hint: "  # how a command ends that fails


def ask(
    socket: Path, *, seconds: float = _ASK_SECONDS, administers: bool = False
) -> adm.StatResponse | None:
    """What the sidecar on that socket says of itself; None if none answers, or a stranger's."""
    # A channel of its own each time: a kept one waits up to two minutes before it tries a lost
    # socket again.
    with SidecarChannel(socket, administers=administers) as channel:
        try:
            answer: adm.StatResponse = channel.stub().Stat(pb.StatRequest(), timeout=seconds)
        except (grpc.RpcError, ServiceError):
            return None
    return answer


def refuse_stranger(socket: Path) -> None:
    """Stranger if another user's process listens there."""
    with contextlib.suppress(OSError):
        OwnListener(socket).close()


def owner(socket: Path) -> int | None:
    """The process id that the sidecar on this socket wrote into its lock file."""
    try:
        return int(socket.with_name(socket.name + ".lock").read_text())
    except (OSError, ValueError):
        return None


@dataclass(slots=True)
class BlockService:
    """A sidecar that can be used. `child` is None if somebody else started it. Not thread-safe."""

    socket: Path
    log: Path
    options: tuple[str | Path, ...] = ()  # of `tiering sidecar`
    env: Mapping[str, str | None] | None = None
    leashed: bool = False
    child: Child | None = None
    _ask_at: float = 0.0  # (monotonic)
    _unanswered: int = 0  # in a row

    def ensure(self, interrupted: Callable[[], bool] = lambda: False) -> adm.StatResponse:
        """Starts a sidecar unless one answers. ServiceError with its last words if it cannot be
        started. One of ours that lives, but cannot be reached, has a while to mend that.
        """
        refuse_stranger(self.socket)
        self._unanswered = 0
        lives = self.child is not None and self.child.running
        if not lives and (found := ask(self.socket)):
            self.child = None
            return found
        if not lives:
            self.child = start(
                "the sidecar",
                *(sys.executable, "-m", "ollama_tiering", "sidecar", "--socket", self.socket),
                *self.options,
                log=self.log,
                env={**package_path(), **(self.env or {})},
                leashed=self.leashed,
            )
        ready = _Ready(self.socket)
        assert self.child is not None
        try:
            wait_ready(self.child, ready, seconds=START_SECONDS, interrupted=interrupted)
        except ServiceError:
            if lives:
                self.give_up()  # the next try starts another one
            raise
        assert ready.answer is not None
        return ready.answer

    def why_not(self, error: Exception) -> str:
        """Cause and cure of a failed start in one line: the sidecar's own words if it said any,
        because these name the place.
        """
        said = self.child.tail().splitlines() if self.child else []
        cause = next((line.strip() for line in reversed(said) if _ERROR in line), "")
        if not cause and self.child and not self.child.running:
            cause = f"it {self.child.how_it_ended()}: {said[-1].strip() if said else ''}"
        hint = next((line.strip() for line in reversed(said) if _HINT in line), "")
        if not cause and not said:
            return in_one_line(error)
        return f"{cause.removeprefix(_ERROR) or str(error).partition(chr(10))[0]}" + (
            f" ({hint.removeprefix(_HINT)})" if hint else ""
        )

    @property
    def answers(self) -> bool:
        """Whether it can be reached: that its process lives is not enough. Cheap: it is asked now
        and then, and one late answer is weather.
        """
        if (self.child and not self.child.running) or not is_socket(self.socket):
            return False
        if time.monotonic() >= self._ask_at:
            self._unanswered = 0 if ask(self.socket) else self._unanswered + 1
            self._ask_at = time.monotonic() + _ASK_AGAIN_SECONDS
        return self._unanswered < _MOST_UNANSWERED

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Ends the sidecar that we started, after it has written down what it has. False if it was
        killed.
        """
        if self.child is None:
            return True
        return self.child.stop(seconds=STOP_SECONDS, hurry=hurry)

    def give_up(self) -> None:
        """Ends a sidecar that did not become ready, and forgets it."""
        if self.child is not None:
            self.child.stop(seconds=_GIVE_UP_SECONDS)
            self.child = None

    def last_words(self) -> str:
        """What it printed at its end: the line that says whether everything is on disk."""
        lines = self.child.tail(1).strip() if self.child else ""
        return lines if lines.startswith("sidecar stopped") else ""

    def obituary(self) -> str:
        """Why it does not answer."""
        if self.child and not self.child.running:
            return died(self.child).message
        lost = "does not answer" if is_socket(self.socket) else "is gone"
        pid = f" (process {self.child.pid})" if self.child else ""
        return f"nobody can reach the sidecar{pid}: {plain(str(self.socket))} {lost}"


class _Ready:
    """Keeps the answer that made it true."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.answer: adm.StatResponse | None = None

    def __call__(self) -> bool:
        self.answer = ask(self._socket)
        return self.answer is not None
