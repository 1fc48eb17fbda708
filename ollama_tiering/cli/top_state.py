"""What `tiering top` has seen: requests that ended between two answers of Stat."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ollama_tiering.cli import status_shortfalls, status_use

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm
    from ollama_tiering.store import block_store_pb2 as pb

MOST_REQUESTS: Final = 200

_Runner = tuple[int, float, bytes]  # process id, unix time of its start, namespace


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """`unseen`: requests of the same runner that ended shortly before, of which nothing is known.
    `seconds_saved` is None if the speed of prefill is not measured yet.
    """

    unix_seconds: float
    model: str
    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    computed_tokens: int
    seconds_saved: float | None
    why: str
    unseen: int


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes a second since the answer before."""

    read: float = 0.0  # by engines that do not open the files themselves too: what was leased
    stored: float = 0.0


class Watched:
    """The last requests, the latest first. Only `take` changes it."""

    def __init__(self) -> None:
        self.requests: deque[EndedRequest] = deque(maxlen=MOST_REQUESTS)
        self.flow = Flow()
        self._counts: dict[_Runner, int] = {}
        self._before: tuple[float, int, int] | None = None

    def take(self, answer: adm.StatResponse, now: float, names: Mapping[str, str]) -> None:
        """`now`: Unix seconds. A runner's last request of before the first answer is not shown."""
        counts: dict[_Runner, int] = {}
        for runner in answer.runners:
            key = runner.pid, runner.started_unix_seconds, runner.namespace
            counts[key] = runner.requests
            # A runner that is new since the first answer began after it.
            before = self._counts.get(key, 0 if self._before else runner.requests)
            if runner.requests > before and runner.HasField("last_request"):
                unseen = runner.requests - before - 1
                self.requests.appendleft(_ended(runner, now, names, unseen))
        self._counts = counts
        if self._before and now > self._before[0]:
            then, read, stored = self._before
            seconds = now - then
            self.flow = Flow(
                max(0, answer.get_bytes - read) / seconds,
                max(0, answer.put_bytes - stored) / seconds,
            )
        self._before = now, answer.get_bytes, answer.put_bytes


def _ended(
    runner: pb.RunnerReport, now: float, names: Mapping[str, str], unseen: int
) -> EndedRequest:
    last = runner.last_request
    return EndedRequest(
        unix_seconds=now,
        model=status_use.shown(runner.model, names),
        prompt_tokens=last.prompt_tokens,
        memory_tokens=last.memory_tokens,
        restored_tokens=last.restored_tokens,
        computed_tokens=status_shortfalls.recomputed(last),
        seconds_saved=_saved(runner),
        why=status_shortfalls.why(runner) or "",
        unseen=unseen,
    )


def _saved(runner: pb.RunnerReport) -> float | None:
    """What computing the restored rows would have taken, less what restoring them took."""
    restored, rate = runner.last_request.restored_tokens, runner.prefill_tokens_per_second
    if not restored:
        return 0.0
    if not rate:
        return None
    last = runner.last_restore
    spent = last.lookup_seconds + last.fetch_seconds + last.copy_seconds
    return restored / rate - (spent if last.tokens == restored else 0.0)
