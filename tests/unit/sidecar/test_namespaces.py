"""The names in an answer of Stat: read once, not waited for where the disk does not answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ollama_tiering.sidecar.namespaces import NamespaceUses
from ollama_tiering.store.block.description import Fields
from ollama_tiering.store.block.key import NamespaceId

NAMES = [NamespaceId(bytes([number]) * 32) for number in range(4)]
COUNTS = [(name, 7) for name in NAMES]


class Disk:
    """Describes the first two; hangs while `answers` is not set."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(4)
        self.answers = threading.Event()
        self.answers.set()
        self.asked: list[NamespaceId] = []
        self.now = 100.0
        self.uses = NamespaceUses(self.describe, self.pool, clock=lambda: self.now)

    def describe(self, name: NamespaceId) -> Fields:
        self.asked.append(name)
        assert self.answers.wait(30)
        return (("model", f"m{name[0]}"), ("engine", "e")) if name in NAMES[:2] else ()

    async def models(self) -> list[str]:
        return [use.model for use in await self.uses.messages(COUNTS)]


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.answers.set()
    made.pool.shutdown()


def test_each_is_read_once_and_what_has_no_description_once_a_minute(disk: Disk) -> None:
    async def go() -> None:
        for _ in range(3):
            assert await disk.models() == ["m0", "m1", "", ""]
        assert disk.asked == NAMES
        disk.now += 61
        assert await disk.models() == ["m0", "m1", "", ""]
        assert disk.asked == [*NAMES, *NAMES[2:]]

    asyncio.run(go())


def test_a_disk_that_hangs_costs_an_answer_little_and_one_thread(disk: Disk) -> None:
    async def go() -> None:
        disk.answers.clear()
        for _ in range(2):
            before = time.monotonic()
            assert await disk.models() == [""] * 4
            assert time.monotonic() - before < 5
        with pytest.raises(TimeoutError):  # a client that does not wait leaves nothing behind
            await asyncio.wait_for(disk.models(), 0.01)
        assert len(disk.asked) == 1
        disk.answers.set()
        while await disk.models() == [""] * 4:
            await asyncio.sleep(0.01)
        assert await disk.models() == ["m0", "m1", "", ""]

    asyncio.run(go())


def test_all_threads_busy_do_not_hold_up_an_answer(disk: Disk) -> None:
    async def go() -> None:
        ready = threading.Event()
        busy = [disk.pool.submit(ready.wait, 30) for _ in range(4)]
        assert await asyncio.wait_for(disk.models(), 10) == [""] * 4
        ready.set()
        assert all(one.result() for one in busy)

    asyncio.run(go())


def test_names_of_what_is_not_stored_any_more_are_forgotten(disk: Disk) -> None:
    async def go() -> None:
        await disk.models()
        await disk.uses.messages(COUNTS[1:])
        assert set(disk.uses._known) == set(NAMES[1:])

    asyncio.run(go())


def test_a_description_that_cannot_be_read_is_no_error_of_the_answer(disk: Disk) -> None:
    async def go() -> None:
        disk.pool.shutdown()
        assert await disk.models() == [""] * 4

    asyncio.run(go())
