"""How many inputs there are, and how each is made again: one seed, one number per input.

TIERING_FUZZ=1000000    inputs in all; each test has its share
TIERING_FLIPS=10000     flipped bits in all
TIERING_FUZZ_SEED=7     another campaign
TIERING_FUZZ_ONLY=31    only this input of the test that is run, e.g. one that failed
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

INPUTS = int(os.environ.get("TIERING_FUZZ", "10000"))
FLIPS = int(os.environ.get("TIERING_FLIPS", "1000"))
SEED = int(os.environ.get("TIERING_FUZZ_SEED", "1"))
ONLY = os.environ.get("TIERING_FUZZ_ONLY")

# Of the inputs, by what they are; the rest of the design is that the quick ones are the many.
SHARES = {
    "block files": 0.68,
    "stored files": 0.04,
    "messages": 0.12,
    "streams": 0.02,
    "engines": 0.02,
    "config": 0.10,
    "names": 0.02,
}

# A thousand inputs of any kind take less than this on one slow core.
SECONDS_PER_THOUSAND = 60

_M_MMAP_THRESHOLD = -3  # of malloc.h


def count(kind: str, total: int = INPUTS) -> int:
    return max(1, round(SHARES[kind] * total))


def time_limit(inputs: int) -> int:
    return 120 + inputs * SECONDS_PER_THOUSAND // 1000


class Campaign:
    """Numbered inputs of one kind, each with a generator of its own. Counts what became of them."""

    def __init__(self, kind: str, inputs: int) -> None:
        self.kind = kind
        self.inputs = inputs
        self.outcomes: Counter[str] = Counter()
        self._started = time.perf_counter()

    def __iter__(self) -> Iterator[int]:
        return iter([int(ONLY)] if ONLY is not None else range(self.inputs))

    def rng(self, number: int) -> random.Random:
        return random.Random(f"{self.kind} {SEED} {number}")

    @contextlib.contextmanager
    def input(self, number: int) -> Iterator[random.Random]:
        """What fails in here says how to make the input again."""
        try:
            yield self.rng(number)
        except BaseException as error:
            error.add_note(self.again(number))
            raise

    def again(self, number: int) -> str:
        return (
            f"{self.kind}: input {number} of seed {SEED}; again with "
            f"TIERING_FUZZ_SEED={SEED} TIERING_FUZZ_ONLY={number}"
        )

    def report(self) -> None:
        seconds = time.perf_counter() - self._started
        print(
            f"{self.kind}: {self.outcomes.total()} inputs, seed {SEED}, {seconds:.0f} s, "
            + ", ".join(f"{n} {what}" for what, n in self.outcomes.most_common())
        )


@contextlib.contextmanager
def at_most(more_bytes: int) -> Iterator[None]:
    """What is allocated in here beyond that many bytes is a MemoryError, by the system's limit."""
    with contextlib.suppress(AttributeError):  # glibc: what is large goes back when it is freed
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
