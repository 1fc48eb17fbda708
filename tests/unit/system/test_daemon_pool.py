"""The pool for file I/O: an executor like any other, but none of its threads holds up an exit."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from ollama_tiering.system.daemon_pool import DaemonPool


@pytest.fixture
def pool() -> Iterator[DaemonPool]:
    made = DaemonPool(2, "test")
    yield made
    made.shutdown()


def test_results_come_in_order_and_errors_where_they_are_asked_for(pool: DaemonPool) -> None:
    assert list(pool.map(lambda a, b: a + b, range(100), range(100))) == list(range(0, 200, 2))
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(10)
    assert pool.submit(pow, 2, 10).result(10) == 1024


def test_so_many_threads_as_are_needed_and_no_more(pool: DaemonPool) -> None:
    def name() -> str:
        return threading.current_thread().name

    pool.submit(name).result(10)
    both = threading.Barrier(3)
    held = [pool.submit(both.wait, 10) for _ in range(2)]
    third = pool.submit(name)
    both.wait(10)
    assert {third.result(10)} <= {"test_0", "test_1"}
    assert sorted(future.result(10) for future in held)


def test_one_that_hangs_is_left_behind_and_what_waits_is_cancelled() -> None:
    pool = DaemonPool(1, "test")
    go_on, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        go_on.wait(60)

    hanging, waiting = pool.submit(hang), pool.submit(int)
    assert entered.wait(10)
    assert not pool.close(0.01)
    with pytest.raises(CancelledError):
        waiting.result(10)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)
    go_on.set()
    assert pool.close(10)
    assert hanging.result(0) is None


EXIT = """
import threading
from ollama_tiering.system.daemon_pool import DaemonPool
entered = threading.Event()
def hang():
    entered.set()
    threading.Event().wait()  # for ever
DaemonPool(1, "test").submit(hang)
assert entered.wait(30)
print("done")
"""


def test_a_call_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    command = [sys.executable, "-c", EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
