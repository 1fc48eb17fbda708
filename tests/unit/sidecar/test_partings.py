"""What the sidecar remembers of partings: little, only what mattered, and no tokens where a rule
forbids them.
"""

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.sidecar.partings.messages import wanted
from ollama_tiering.sidecar.partings.metrics import PartingCollector
from ollama_tiering.sidecar.partings.partings import Partings
from ollama_tiering.sidecar.partings.record import (
    MOST,
    MOST_BYTES,
    MOST_WITHOUT_LOSS,
    PartingRecord,
    kept,
)
from ollama_tiering.store import NamespaceId
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books.watch import ShortLookUp
from ollama_tiering.store.tools.partings import MOST_BEFORE, MOST_BEHIND, Parting, PartingKind
from tests.unit.sidecar.scrape import of_registry

NAMESPACE = NamespaceId(bytes(31) + b"\1")
OTHER = NamespaceId(bytes(31) + b"\2")
MIB = 1 << 20
SUMS = ("requests", "lost_tokens", "lost_seconds")


def parting(number: int = 0, *, lost: int = 900, prompt: int = 1000, **more: Any) -> Parting:
    values: dict[str, Any] = {
        "kind": PartingKind.DIFFERS,
        "unix_seconds": 1000.0 + number,
        "namespace": NAMESPACE,
        "prompt_tokens": prompt,
        "at_token": 50,
        "lost_tokens": lost,
        "before": b"bef0",
        "asked": b"ask0",
        "stored": b"sto0",
    }
    return Parting(**values | more)


class Finder:
    """Stands for the store's notes."""

    def __init__(self) -> None:
        self.notes: list[Parting | None] = []
        self.allowed = True

    def next(self) -> tuple[ShortLookUp, Parting | None] | None:
        short = ShortLookUp(0.0, NAMESPACE, b"", 0, None, 0)
        return (short, self.notes.pop(0)) if self.notes else None

    def text_allowed(self, _: NamespaceId) -> bool:
        return self.allowed

    def model(self, _: NamespaceId) -> str:
        return "model"


class Place:
    def __init__(self) -> None:
        self.now = 1000.0
        self.finder = Finder()
        self.counted: list[str] = []  # models
        self.partings = Partings(self.finder, lambda: self.now, self.counted.append)  # type: ignore[arg-type]
        self._requests = 0

    def report(self, reason: int, *, again: bool = False, **last: int) -> None:
        """1000 prompt tokens, of which 50 came back, unless said otherwise."""
        self._requests += not again
        values = {"prompt_tokens": 1000, "restored_tokens": 50, "shortfall": reason, **last}
        self.partings.reported(
            pb.RunnerReport(
                pid=1 << 22,  # no process
                namespace=NAMESPACE,
                requests=self._requests,
                prefill_tokens_per_second=100.0,
                last_request=pb.LastRequest(**values),  # type: ignore[arg-type]
                settings=pb.RunnerSettings(context_tokens=4096),
            )
        )

    def found(self) -> list[tuple[int | None, int]]:
        """Computed and lost tokens, the latest first."""
        all_of_it = self.partings.latest(lambda _: True, 0)
        return [(one.computed_tokens, one.lost_tokens) for one in all_of_it]


@pytest.fixture
def place() -> Place:
    return Place()


def test_what_became_of_the_request_is_put_to_its_look_up(place: Place) -> None:
    place.finder.notes = [parting(), parting(prompt=2000)]
    place.report(pb.SHORTFALL_DIFFERS)
    assert place.found() == [(None, 900), (950, 900)]
    place.report(pb.SHORTFALL_DIFFERS, prompt_tokens=2000, restored_tokens=1500)
    assert place.found() == [(500, 500), (950, 900)]  # no more is lost than was computed
    assert {one.num_ctx for one in place.partings.latest(lambda _: True, 0)} == {4096}


def test_each_parting_that_cost_something_is_counted_once_and_no_other(place: Place) -> None:
    place.finder.notes = [parting(), parting(lost=1, prompt=1100), parting(prompt=1200)]
    place.partings.digest()
    assert place.counted == []  # nobody knows yet what became of them
    place.report(pb.SHORTFALL_DIFFERS)
    place.report(pb.SHORTFALL_DIFFERS, again=True)
    place.report(pb.SHORTFALL_DIFFERS, prompt_tokens=1100)
    place.report(pb.SHORTFALL_GATE, prompt_tokens=1200)
    place.partings.digest()
    assert place.counted == ["model"]
    place.report(pb.SHORTFALL_BLOCKS_GONE)
    place.partings.digest()
    assert place.counted == ["model"] * 2


def test_a_report_that_says_nothing_new_is_no_other_request(place: Place) -> None:
    place.report(pb.SHORTFALL_DIFFERS)
    place.finder.notes = [parting()]
    assert place.found() == [(950, 900)]
    place.finder.notes = [parting(1)]
    place.now += 5
    place.report(pb.SHORTFALL_DIFFERS, again=True)
    assert place.found() == [(None, 900), (950, 900)]


@pytest.mark.parametrize(
    ("reason", "last"),
    [
        (pb.SHORTFALL_DIFFERS, {"memory_tokens": 60, "restored_tokens": 0}),
        (pb.SHORTFALL_UNSPECIFIED, {"memory_tokens": 0, "restored_tokens": 999}),
        (pb.SHORTFALL_GATE, {}),
        (pb.SHORTFALL_NO_MEMORY, {}),
        (pb.SHORTFALL_SIDECAR_LATE, {}),
    ],
    ids=["memory had more", "nothing was computed", "gate", "no memory", "late"],
)
def test_a_prompt_that_was_computed_for_another_reason_did_not_part(
    place: Place, reason: int, last: dict[str, int]
) -> None:
    place.finder.notes = [parting()]
    place.report(reason, **last)
    assert place.found() == []


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (pb.SHORTFALL_DAMAGED, PartingKind.DAMAGED),
        (pb.SHORTFALL_UNREADABLE, PartingKind.DAMAGED),
        (pb.SHORTFALL_BLOCKS_GONE, PartingKind.EVICTED),
    ],
)
def test_blocks_that_were_found_and_not_there_are_told(
    place: Place, reason: int, kind: PartingKind
) -> None:
    place.report(reason, restored_tokens=128)
    (one,) = place.partings.latest(lambda _: True, 0)
    assert (one.parting.kind, one.parting.at_token, one.lost_tokens) == (kind, 128, 872)
    place.finder.notes = [parting()]
    place.report(reason, restored_tokens=128)  # of a prompt that would have parted further on
    assert [other.parting.kind for other in place.partings.latest(lambda _: True, 0)] == [kind] * 2


def test_what_a_day_cost_is_summed_up_with_the_measured_speed(place: Place) -> None:
    place.finder.notes = [parting(), parting(1, lost=63), parting(2, namespace=OTHER)]
    place.report(pb.SHORTFALL_DIFFERS, prompt_tokens=1)
    place.partings.digest()
    assert place.partings.lost_in_a_day() == (2, 1800, 9.0)  # the other's speed is not known
    registry = CollectorRegistry()
    registry.register(PartingCollector(place.partings))
    shown = [of_registry(registry)(f"tiering_partings_{name}") for name in SUMS]
    assert shown == [2, 1800, 9.0]
    place.now += 86_401 + 2
    assert place.partings.lost_in_a_day() == (0, 0, 0.0)


def test_summing_up_does_not_wait_for_what_is_being_digested(place: Place) -> None:
    class Slow(Finder):
        def next(self) -> tuple[ShortLookUp, Parting | None] | None:
            assert place.partings.lost_in_a_day().requests == 0  # on the event loop, meanwhile
            return super().next()

    slow = Slow()
    slow.notes = [None]
    place.partings._finder = slow  # type: ignore[assignment]
    place.partings.digest()


def test_no_token_is_kept_or_shown_where_a_rule_forbids_it(place: Place) -> None:
    place.finder.notes = [parting()]
    (before,) = place.partings.latest(lambda _: True, 0)
    assert place.partings.shown(before)[0].before == b"bef0"
    place.finder.allowed = False  # a rule that came later
    assert place.partings.shown(before) == (before.parting, True)
    assert before.parting.before == before.parting.asked == before.parting.stored == b""
    place.finder.notes = [parting(1)]
    after, _ = place.partings.latest(lambda _: True, 0)
    assert after.packed == (b"", b"", b"")


def test_the_record_is_bounded_in_number_and_the_oldest_go() -> None:
    record = PartingRecord()
    for number in range(MOST + 50):
        record.add(kept(parting(number), tokens=True))
    assert [one.parting.unix_seconds - 1000 for one in record] == [*range(MOST + 49, 49, -1)]
    record.drop(next(iter(record)))
    assert (len(record), record.size_bytes) == (
        MOST - 1,
        sum(one.size_bytes for one in record),
    )


def test_prompts_that_lost_nothing_do_not_push_out_those_that_did() -> None:
    record = PartingRecord()
    for number in range(10):
        record.add(kept(parting(number), tokens=True))
    for number in range(3 * MOST):
        record.add(kept(parting(number, lost=0), tokens=True))
    assert sum(one.parting.lost_tokens > 0 for one in record) == 10
    assert len(record) == 10 + MOST_WITHOUT_LOSS


def test_of_the_longest_prompts_with_tokens_like_noise_it_takes_less_than_its_bound() -> None:
    record = PartingRecord()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for number in range(120):
            noise = os.urandom(4 * MOST_BEFORE)
            sides = {"before": noise, "asked": noise[: 4 * MOST_BEHIND]}
            record.add(kept(parting(number, **sides), tokens=True))
        del noise, sides
        taken = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    assert 0 < record.size_bytes <= MOST_BYTES
    assert taken <= MOST_BYTES + MIB
    assert len(record) > 30


def test_a_model_is_meant_by_a_part_of_its_name_by_its_files_or_by_its_namespace(
    place: Place,
) -> None:
    (one,) = [kept(parting(), tokens=False)]
    for asked, meant in (
        (adm.PartingsRequest(), True),
        (adm.PartingsRequest(model="MOD"), True),
        (adm.PartingsRequest(model="qwen", models=["model"]), True),
        (adm.PartingsRequest(model=NAMESPACE.hex()[:8]), True),
        (adm.PartingsRequest(model="qwen", models=["other"]), False),
    ):
        assert wanted(asked, place.partings)(one) is meant
    with pytest.raises(ValueError, match="10,001 models named"):
        wanted(adm.PartingsRequest(models=["m"] * 10_001), place.partings)
