"""What decode is limited by: the same kernel on rows that stay in a cache, and reading by itself.

In cache, the kernel and its arithmetic are those of the problem, but every page of the page table
is the same one. A run that overlaps computing and reading takes the longer of the two, one that
does not takes their sum.
"""

from __future__ import annotations

from typing import Final

from measure.attention.alternate import Series
from measure.attention.rig import milliseconds
from measure.results import Ratio
from ollama_tiering.kernels.samples import Problem

NOTE: Final = (
    "In cache: the same run, but every page of the page table is one page that stays in the "
    "caches. Reading: the bytes of K and V at the read bandwidth. Computing that overlaps reading "
    "takes the longer of the two (ratio 1), computing that waits for it takes their sum."
)


def of_memory(
    name: str, problem: Problem, ours: Series, cached: Series, read: Series
) -> list[Ratio]:
    """`read` is in seconds per byte."""
    reading = problem.kv_bytes * read.best
    measured = milliseconds(ours)
    limits = f"in cache {milliseconds(cached)}, reading {1e3 * reading:.4g} ms"
    return [
        Ratio(
            f"{name}, ours ÷ {what}",
            measured,
            limits,
            ours.best / combined,
        )
        for what, combined in (
            ("longer of in cache and reading", max(cached.best, reading)),
            ("sum of in cache and reading", cached.best + reading),
        )
    ]


def of_arithmetic(name: str, problem: Problem, cached: Series, fma: Series) -> Ratio:
    """`fma` is in seconds per operation."""
    multiplying = problem.flops * fma.best
    return Ratio(
        f"{name}, in cache ÷ multiply-adds alone",
        milliseconds(cached),
        f"{1e3 * multiplying:.4g} ms",
        cached.best / multiplying,
    )
