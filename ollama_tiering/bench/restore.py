"""What a restore saves: time to the first token computed cold, and after a restart of both
processes.

The engine is given; this module only knows the order of things. Cold is measured once for a case
(it takes long), restored several times. As many more restarts have the runner time a memcpy of the
same bytes beside the restore: that costs time, so no time to first token is taken from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ollama_tiering.bench.table import Table, rate, ratio, seconds
from ollama_tiering.errors import ResultDiffers

NEW_TOKENS = 8


class Answer(Protocol):
    @property
    def tokens(self) -> tuple[str, ...]: ...
    @property
    def logprobs(self) -> tuple[tuple[tuple[str, float], ...], ...]: ...
    @property
    def seconds_to_first_token(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def restored_tokens(self) -> int: ...


class Copying(Protocol):
    """What the runner says of its last restore. Fetching is reading and comparing checksums."""

    @property
    def bytes(self) -> int: ...
    @property
    def lookup_seconds(self) -> float: ...
    @property
    def fetch_seconds(self) -> float: ...
    @property
    def copy_seconds(self) -> float: ...
    @property
    def memcpy_seconds(self) -> float: ...
    @property
    def memcpy_all_seconds(self) -> float: ...


class Engine(Protocol):
    """`again` restarts both processes; `reboot` also empties RAM; `measure` times a memcpy."""

    def ask(self, prompt: str, new_tokens: int) -> Answer: ...

    def again(self, *, reboot: bool, measure: bool) -> None: ...

    def last_restore(self) -> Copying: ...


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt length with one setting of flash attention, from one tier."""

    flash: bool
    tier: str
    prompt_tokens: int
    restored_tokens: int
    cold_seconds: float
    hit_seconds: float
    restored_seconds: tuple[float, ...]
    restored_bytes: int
    lookup_seconds: float  # this and the following: medians
    fetch_seconds: float
    copy_seconds: float
    memcpy_seconds: float  # one thread
    memcpy_all_seconds: float  # as many threads as the restore

    @property
    def whole_seconds(self) -> float:
        return self.lookup_seconds + self.fetch_seconds + self.copy_seconds

    @property
    def restored_median(self) -> float:
        return statistics.median(self.restored_seconds)

    @property
    def gain(self) -> float:
        return self.cold_seconds / self.restored_median

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"restored_median_seconds": self.restored_median, "gain": self.gain}


def measure(
    engine: Engine,
    prompt: str,
    say: Callable[[str], None],
    *,
    flash: bool,
    tier: str,
    repeat: int,
    cold: float | None = None,
) -> Case:
    """One case. ResultDiffers where a restored answer is not that of the in-memory hit."""
    name = f"{len(prompt)} tokens, flash attention {'on' if flash else 'off'}"
    if cold is None:
        say(f"{name}: cold")
        first = engine.ask(prompt, NEW_TOKENS)
        if first.restored_tokens:
            raise ResultDiffers(f"the cold run of {len(prompt)} tokens restored some")
        cold = first.seconds_to_first_token
    hit = engine.ask(prompt, NEW_TOKENS)
    restored: list[Answer] = []
    reports: list[Copying] = []
    for number in range(2 * repeat):
        beside = number >= repeat
        what = ", with a memcpy beside it" if beside else ""
        say(f"{name}: restored from {tier}, {number % repeat + 1} of {repeat}{what}")
        engine.again(reboot=tier == "local", measure=beside)
        answer = engine.ask(prompt, NEW_TOKENS)
        _require_same(hit, answer)
        if beside:
            reports.append(engine.last_restore())
        else:
            restored.append(answer)

    def median(of: Callable[[Copying], float]) -> float:
        return statistics.median(map(of, reports))

    return Case(
        flash=flash,
        tier=tier,
        prompt_tokens=hit.prompt_tokens,
        restored_tokens=restored[-1].restored_tokens,
        cold_seconds=cold,
        hit_seconds=hit.seconds_to_first_token,
        restored_seconds=tuple(answer.seconds_to_first_token for answer in restored),
        restored_bytes=reports[-1].bytes,
        lookup_seconds=median(lambda r: r.lookup_seconds),
        fetch_seconds=median(lambda r: r.fetch_seconds),
        copy_seconds=median(lambda r: r.copy_seconds),
        memcpy_seconds=median(lambda r: r.memcpy_seconds),
        memcpy_all_seconds=median(lambda r: r.memcpy_all_seconds),
    )


def _require_same(hit: Answer, restored: Answer) -> None:
    if not restored.restored_tokens:
        raise ResultDiffers("nothing was restored", hint="run again with --keep, read the logs")
    if (hit.tokens, hit.logprobs) != (restored.tokens, restored.logprobs):
        raise ResultDiffers("a restored answer differs from that of the in-memory hit")


def table(shape: str, cases: list[Case]) -> Table:
    headings = ["prompt", "flash", "from", "cold", "restored", "gain", "in-memory hit", "bytes",
                "look-up + fetch + copy", "copy, of memcpy",
                "whole restore, of memcpy"]  # fmt: skip
    rows = [
        [
            f"{case.prompt_tokens:,}",
            "on" if case.flash else "off",
            case.tier,
            seconds(case.cold_seconds),
            seconds(case.restored_median),
            ratio(case.gain),
            seconds(case.hit_seconds),
            f"{case.restored_bytes / 1e6:,.0f} MB",
            " + ".join(
                f"{1e3 * part:.0f}"
                for part in (case.lookup_seconds, case.fetch_seconds, case.copy_seconds)
            )
            + " ms",
            _of_memcpy(case, case.copy_seconds),
            _of_memcpy(case, case.whole_seconds),
        ]
        for case in cases
    ]
    repeat = len(cases[0].restored_seconds)
    notes = [
        "Seconds are to the first token with the model loaded; cold is one run, restored the "
        f"median of {repeat} restarts of sidecar and server.",
        "Every restored answer had the tokens and top-5 log probabilities of the in-memory hit.",
        "`from ram`: the RAM tier (tmpfs) lived through the restart. `from local`: it was emptied "
        "and the files of the local tier were dropped from the page cache, as after a reboot.",
        "Copy is what happens under the runner's lock; the whole restore is look-up, fetch with "
        "check, and copy. The shares are of a memcpy of the same bytes in the same process: by "
        f"one thread, then by as many threads as the restore uses; medians of {repeat} restarts.",
    ]
    return Table(f"Restore instead of recompute, {shape}", headings, rows, notes)


def _of_memcpy(case: Case, spent: float) -> str:
    if not spent or not case.memcpy_seconds:
        return "not measured"
    one, every = (100 * t / spent for t in (case.memcpy_seconds, case.memcpy_all_seconds))
    return f"{rate(case.restored_bytes / spent)}, {one:.0f} % / {every:.0f} %"
