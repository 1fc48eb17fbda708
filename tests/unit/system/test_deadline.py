"""Calls that hang cost their deadline once, never a thread more than the bound, and come back."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ollama_tiering.system.deadline import DeadlineThreads

DEADLINE = 0.1


@pytest.fixture
def threads() -> Iterator[DeadlineThreads]:
    made = DeadlineThreads("test", limit=2, deadline_seconds=DEADLINE)
    yield made
    made.close()


@pytest.fixture
def mount() -> Iterator[threading.Event]:
    """Set when the mount answers again."""
    event = threading.Event()
    yield event
    event.set()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_results_and_errors_pass_through(threads: DeadlineThreads) -> None:
    assert threads.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        threads.call(lambda: 1 // 0)


def test_a_hanging_call_ends_at_its_deadline(
    threads: DeadlineThreads, mount: threading.Event
) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        threads.call(mount.wait)
    assert caught.value.errno == errno.ETIMEDOUT
    assert DEADLINE <= time.monotonic() - start < 20 * DEADLINE
    assert threads.stalled == 1
    assert threads.call(lambda: 7) == 7  # the other thread serves


def test_at_the_bound_calls_fail_at_once(threads: DeadlineThreads, mount: threading.Event) -> None:
    for _ in range(2):
        with pytest.raises(TimeoutError):
            threads.call(mount.wait)
    ran: list[int] = []
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(TimeoutError, match="hang already"):
            threads.call(lambda: ran.append(1))
    assert time.monotonic() - start < DEADLINE
    assert not ran
    assert sum(thread.name.startswith("test-") for thread in threading.enumerate()) <= 2


def test_threads_that_return_serve_again(threads: DeadlineThreads, mount: threading.Event) -> None:
    for _ in range(2):
        with pytest.raises(TimeoutError):
            threads.call(mount.wait)
    mount.set()
    until(lambda: threads.stalled == 0)
    assert threads.call(lambda: 7) == 7


def test_a_late_result_is_cleaned_up(threads: DeadlineThreads, mount: threading.Event) -> None:
    late: list[object] = []
    with pytest.raises(TimeoutError):
        threads.call(mount.wait, late=late.append)
    assert not late
    mount.set()
    until(lambda: late == [True])


def test_a_result_in_time_is_not_cleaned_up(threads: DeadlineThreads) -> None:
    late: list[object] = []
    assert threads.call(lambda: 7, late=late.append) == 7
    assert not late


def test_what_nobody_waits_for_any_more_is_not_begun(
    threads: DeadlineThreads, mount: threading.Event
) -> None:
    threads.submit(mount.wait)
    threads.submit(mount.wait)
    ran: list[int] = []
    with pytest.raises(TimeoutError):
        threads.call(lambda: ran.append(1))
    mount.set()
    until(lambda: threads.stalled == 0)
    assert threads.call(lambda: 7) == 7
    assert not ran


def test_submitted_calls_that_hang_count_as_stalled(
    threads: DeadlineThreads, mount: threading.Event
) -> None:
    threads.submit(mount.wait)
    until(lambda: threads.stalled == 1)


def test_after_close_calls_fail_at_once_and_idle_threads_end(mount: threading.Event) -> None:
    made = DeadlineThreads("closing", limit=4, deadline_seconds=DEADLINE)
    with pytest.raises(TimeoutError):
        made.call(mount.wait)
    assert made.call(lambda: 7) == 7
    made.close()
    with pytest.raises(OSError, match="closed"):
        made.call(lambda: 7)

    def left() -> int:
        return sum(thread.name.startswith("closing-") for thread in threading.enumerate())

    until(lambda: left() == 1)
    mount.set()
    until(lambda: left() == 0)
