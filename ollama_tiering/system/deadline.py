"""Calls that may never return, each with a deadline, in a bounded set of daemon threads.

A system call on a hung network mount cannot be interrupted. Its thread is abandoned, and is used
again if the call ever returns. While all threads hang, every call fails at once.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class InUse:
    """Closes something only when no call uses it any more, not even one that hangs. Otherwise an
    abandoned call could go on with a descriptor that means another file by then.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    def __enter__(self) -> None:
        with self._lock:
            if self._closing:
                raise OSError(errno.EBADF, "closed")
            self._users += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self._close()

    def close(self) -> None:
        with self._lock:
            last = not self._closing and not self._users
            self._closing = True
        if last:
            self._close()


class _State(enum.Enum):
    QUEUED = 1
    RUNNING = 2
    DONE = 3
    CANCELLED = 4  # nobody waits for it, and it was not begun
    ABANDONED = 5  # nobody waits for it, but it runs


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T], late: Callable[[T | None], None] | None) -> None:
        self.work = work
        self.late = late
        self.state = _State.QUEUED
        self.begun = 0.0
        self.result: T | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # handed to whoever waits
            self.error = error


class DeadlineThreads:
    """Thread-safe. Threads are started when they are needed, at most `limit`."""

    def __init__(self, name: str, *, limit: int, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._threads = 0
        self._load = 0  # jobs queued or running
        self._running: set[_Job[Any]] = set()
        self._closed = False

    @property
    def stalled(self) -> int:
        """Calls that are past their deadline and have not returned yet."""
        with self._lock:
            return self._count_stalled()

    def call(self, work: Callable[[], T], *, late: Callable[[T | None], None] | None = None) -> T:
        """Returns or raises what `work` does. TimeoutError past the deadline, or if all threads
        hang. If `work` ends after that, `late` gets its result (None if it failed) and can clean
        up.
        """
        job = _Job(work, late)
        self._start(job)
        if not job.done.wait(self.deadline_seconds):
            with self._lock:
                if job.state is _State.QUEUED:
                    job.state = _State.CANCELLED
                elif job.state is _State.RUNNING:
                    job.state = _State.ABANDONED
                if job.state is not _State.DONE:
                    reason = f"no answer within {self.deadline_seconds:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, reason)
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None  # it refers to this frame
        return job.result  # type: ignore[return-value] # set where there is no error

    def submit(self, work: Callable[[], object]) -> None:
        """Runs it at some time, when a thread is free. Nobody learns how it went."""
        with contextlib.suppress(OSError):
            self._start(_Job(work, None), bounded=False)

    def close(self) -> None:
        """Ends the threads that do not hang; later calls fail at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _start(self, job: _Job[Any], *, bounded: bool = True) -> None:
        with self._lock:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "closed")
            if bounded and (stalled := self._count_stalled()) >= self._limit:
                raise TimeoutError(errno.ETIMEDOUT, f"calls that hang already: {stalled}")
            self._load += 1
            self._queue.put(job)
            if self._load <= self._threads or self._threads >= self._limit:
                return
            self._threads += 1
            name = f"{self._name}-{self._threads}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                if job.state is not _State.QUEUED:
                    self._load -= 1
                    continue
                job.state = _State.RUNNING
                job.begun = time.monotonic()
                self._running.add(job)
            job.run()
            with self._lock:
                abandoned = job.state is _State.ABANDONED
                if not abandoned:
                    job.state = _State.DONE
                    self._end(job)
            job.done.set()
            if abandoned:
                if job.late is not None:
                    with contextlib.suppress(OSError):
                        job.late(job.result)
                with self._lock:
                    self._end(job)
            del job  # what it refers to must not live until the next one comes

    def _end(self, job: _Job[Any]) -> None:
        self._running.discard(job)
        self._load -= 1

    def _count_stalled(self) -> int:
        """Needs the lock held. Jobs that were only submitted count, too, because their
        threads are missing as well.
        """
        if not self._running:
            return 0
        late = time.monotonic() - self.deadline_seconds
        return sum(job.state is _State.ABANDONED or job.begun <= late for job in self._running)
