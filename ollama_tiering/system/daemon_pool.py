"""A pool of threads for file I/O that may hang for ever, as a read of a dead disk does.

Before it ends, the interpreter waits for the threads of a ThreadPoolExecutor, so it might never
end. The threads here are daemons: what hangs in them ends with the process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonPool(Executor):
    """Thread-safe. Threads are started when they are needed, at most `limit`."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """RuntimeError after it was shut down."""
        done: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is shut down")
            self._jobs.put((done, lambda: fn(*args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._limit:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits, if told to, as long as it takes; `close` has a deadline."""
        self._end(cancel_futures=cancel_futures)
        if wait:
            for thread in self._threads:
                thread.join()

    def close(self, wait_seconds: float = 0.0) -> bool:
        """Cancels what has not begun, and waits for the rest for this time. Returns whether all has
        ended.
        """
        self._end(cancel_futures=True)
        deadline = time.monotonic() + wait_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _end(self, *, cancel_futures: bool) -> None:
        with self._lock:
            self._closed = True
            if cancel_futures:
                with contextlib.suppress(queue.Empty):
                    while True:
                        job = self._jobs.get_nowait()
                        if job is not None:
                            job[0].cancel()
            for _ in self._threads:
                self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, call = job
            if done.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # handed to whoever waits
                    done.set_exception(error)
                    del error
                else:
                    done.set_result(result)
                    del result
            del job, done, call  # what they refer to must not live until the next one comes
            self._idle.release()
