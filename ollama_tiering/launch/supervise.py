"""Keeps two processes running: the server, and the sidecar that helps it.

If the server ends, all ends; another may take its place before. If the sidecar dies, or nobody can
reach it, it is started again after a pause that grows each time, and the server goes on. Each cause
is reported once. They are stopped in the order that loses nothing: first the server, which stores
what its models hold, then the sidecar, which writes it down.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from ollama_tiering.launch.block_service import BlockService
from ollama_tiering.launch.ollama import STOP_SECONDS
from ollama_tiering.launch.process import Child, died
from ollama_tiering.launch.unharmed import unharmed

TICK_SECONDS = 0.1
ASK_EVERY_SECONDS = 2.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP. The first one asks for an end, the second one insists."""

    def __init__(self) -> None:
        self.count = 0

    def asked(self) -> bool:
        return self.count > 0

    def insisted(self) -> bool:
        return self.count > 1

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which a signal is counted and raises nothing."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True)
class Pair:
    """The running processes. `say` is called with what a person should know; `changed` is called
    when a process is new.
    """

    service: BlockService | None  # None: the server alone, as stock
    server: Child
    interrupts: Interrupts
    say: Callable[[str], None]
    changed: Callable[[], None] = lambda: None
    look: Callable[[], None] = lambda: None  # now and then
    successor: Callable[[], Child | None] = lambda: None  # now and then: a server in its place
    first_pause_seconds: float = FIRST_PAUSE_SECONDS
    settled_seconds: float = (
        LONGEST_PAUSE_SECONDS  # a sidecar that lives this long counts as well again
    )
    _pause_seconds: float = 0.0
    _since: float = 0.0  # (monotonic) the sidecar runs
    _said: set[str] = field(default_factory=set)  # since it was well

    def watch(self) -> None:
        """Returns when an end is asked for. ServiceError if the server ended by itself."""
        self._since = time.monotonic()
        self._pause_seconds = self.first_pause_seconds
        ask_at = time.monotonic() + ASK_EVERY_SECONDS
        while not self.interrupts.asked():
            if not self.server.running:
                raise died(self.server)
            due = time.monotonic() >= ask_at
            service = self.service
            if service and (service.child or due) and not service.answers:
                self._again(service)
                continue
            if due:
                ask_at = time.monotonic() + ASK_EVERY_SECONDS
                with unharmed(self._say_once, "not looked at"):
                    self.look()
                if other := self.successor():
                    self.server = other
                    self.changed()
            time.sleep(TICK_SECONDS)

    def _again(self, service: BlockService) -> None:
        """Starts the sidecar after a pause, which becomes longer until the sidecar lives for a
        while.
        """
        if self._since and time.monotonic() - self._since >= self.settled_seconds:
            self._pause_seconds = self.first_pause_seconds
            self._said.clear()
        self._say_once(
            f"{service.obituary()}\nserving goes on without it; trying again in "
            f"{self._pause_seconds:g} s, then after longer pauses"
        )
        self._since = 0.0
        if self._rest(self._pause_seconds):
            return
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        try:
            service.ensure(self._over)
        except KeyboardInterrupt:  # `ensure` was told that it is over
            return
        except Exception as error:  # whatever it is, the server goes on
            self._say_once(str(error))
            return
        self._since = time.monotonic()
        self.changed()
        self._say_once("the sidecar runs again")

    def _say_once(self, text: str) -> None:
        """The first line tells a cause apart; the last lines of a log differ by their times."""
        cause = text.partition("\n")[0]
        if cause not in self._said:
            self._said.add(cause)
            self.say(text)

    def _rest(self, seconds: float) -> bool:
        """Returns True if an end was asked for meanwhile."""
        resume_at = time.monotonic() + seconds
        while time.monotonic() < resume_at and not self._over():
            time.sleep(TICK_SECONDS)
        return self._over()

    def _over(self) -> bool:
        return self.interrupts.asked() or not self.server.running

    def stop_server(self) -> bool:
        """False if it was killed before its models' K/V was stored."""
        polite = self.server.stop(seconds=STOP_SECONDS, hurry=self.interrupts.insisted)
        if not polite:
            self.say("ollama serve was killed; what was not stored yet will be computed again")
        return polite

    def stop_sidecar(self) -> None:
        insisted = self.interrupts.count
        if self.service is None:
            return
        if not self.service.child:
            self.say("the sidecar ran before and stays")
        elif self.service.stop(lambda: self.interrupts.count > max(1, insisted)):
            self.say(self.service.last_words() or "sidecar stopped")
        else:
            self.say("the sidecar was killed; blocks in RAM stay there until a reboot")
