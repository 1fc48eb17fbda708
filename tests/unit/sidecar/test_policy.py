"""Windows of the Go engines, the last position at which all of them are stored; and the gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from ollama_tiering.sidecar.policy.gate import DEFAULT_COPY_RATE, drifted, restore_pays
from ollama_tiering.sidecar.policy.spans import RowSpan, resumable
from ollama_tiering.sidecar.policy.windows import WindowCache, last_windows
from ollama_tiering.sidecar.prompt_look_up import Prepared, PromptLookUps
from ollama_tiering.store import (
    AttachedBlock,
    BlockKey,
    MatchedBlock,
    TierKind,
    block_key,
    tokens_to_bytes,
    window_end_extra,
)
from ollama_tiering.store import block_store_pb2 as pb

TOKENS = tokens_to_bytes(range(300))
CACHES = [WindowCache(1, 100, 16), WindowCache(2, 20, 8)]
SECONDS = 0.5


def keys() -> list[BlockKey]:
    parent, found = bytes(32), []
    for first in range(0, 300, 64):
        parent = block_key(parent, TOKENS[4 * first : 4 * (first + 64)], [])
        found.append(parent)
    return found


def matched(*ends: tuple[int, int], rows: int = 300) -> list[MatchedBlock]:
    """Blocks of the prompt, on which windows (child, end) hang."""
    blocks = []
    for number, key in enumerate(keys()):
        first = 64 * number
        attached = tuple(
            AttachedBlock(ended_by(child, end), 1, 1, SECONDS)
            for child, end in ends
            if first < end <= first + 64
        )
        held = min(64, 300 - first)
        used = max(0, min(held, rows - first))
        if used:
            blocks.append(MatchedBlock(key, used, held, TierKind.RAM, 1, 1, 0.1, attached))
    return blocks


def ended_by(child: int, end: int) -> BlockKey:
    first = (end - 1) // 64 * 64
    begin = max(first, end - dict(zip((1, 2), (100, 20), strict=True))[child])
    extra = window_end_extra(child, begin - first)
    return block_key(keys()[first // 64], TOKENS[4 * begin : 4 * end], [extra])


def both(*ends: int) -> list[tuple[int, int]]:
    return [(child, end) for end in ends for child in (1, 2)]


def at(found: Sequence[MatchedBlock], least: int, most: int, spans: Sequence[RowSpan] = ()) -> int:
    ends = last_windows(
        found, TOKENS, 64, CACHES, least, most, lambda at: resumable(spans, at) == at
    )
    return ends.at if ends else 0


def test_the_last_position_that_has_all_windows() -> None:
    found = matched(*both(70, 128, 200), (1, 230), (2, 240))
    assert at(found, 1, 300) == 200
    assert at(found, 1, 200) == 200
    assert at(found, 1, 199) == 128
    assert at(found, 128, 199) == 128
    assert at(found, 129, 199) == 0
    assert at(found, 71, 127) == 0
    assert at(found, 1, 69) == 0
    assert at([], 1, 300) == 0


def test_a_window_of_one_position_is_none_of_another() -> None:
    found = matched((1, 200), (2, 201))
    assert at(found, 1, 300) == 0


def test_a_prompt_that_matches_in_part_ends_within_the_block() -> None:
    assert at(matched(*both(260, 290), rows=280), 1, 280) == 260


def test_no_window_ends_within_a_span() -> None:
    found = matched(*both(128, 200))
    assert at(found, 1, 300, [RowSpan(190, 230)]) == 128
    assert at(found, 1, 300, [RowSpan(200, 230)]) == 200


def test_seconds_and_bytes_are_those_of_the_whole_windows() -> None:
    ends = last_windows(matched(*both(200)), TOKENS, 64, CACHES, 1, 300, lambda _: True)
    assert ends is not None
    assert [one.key for one in ends.blocks] == [ended_by(1, 200), ended_by(2, 200)]
    # The last block has 8 rows of the 100, and 8 of the 20.
    assert ends.seconds == SECONDS * 100 / 8 + SECONDS * 20 / 8
    assert ends.bytes == 100 * 16 + 20 * 8
    early = last_windows(matched(*both(70)), TOKENS, 64, CACHES, 1, 300, lambda _: True)
    assert early is not None
    assert early.bytes == 70 * 16 + 20 * 8


class OneHistory:
    """A store that has the prompt, with these windows."""

    def __init__(self, found: list[MatchedBlock]) -> None:
        self.found = found

    def find_history(self, *_: object) -> tuple[list[MatchedBlock], Callable[[], None]]:
        return self.found, lambda: None


def prepared(found: list[MatchedBlock], *, at_checkpoints: bool = False, **said: int) -> Prepared:
    windows = [
        pb.WindowSought(
            child=one.child, size=one.size, row_bytes=one.row_bytes, at_checkpoints=at_checkpoints
        )
        for one in CACHES
    ]
    request = pb.LookUpRequest(
        namespace=bytes(32),
        tokens=TOKENS,
        block_tokens=64,
        most_rows=300,
        min_tokens=said.pop("min_tokens", 1),
        windows=windows,
        **said,
    )
    answer = PromptLookUps(cast(Any, OneHistory(found))).prepare(request)
    assert answer.plan.files == len(answer.keys)
    if answer.keys:
        ends = [ended_by(child, answer.plan.end_row) for child in (1, 2)]
        assert list(answer.keys[-2:]) == ends
    return answer


def test_rows_are_planned_up_to_where_their_windows_end() -> None:
    plan = prepared(matched(*both(128, 200))).plan
    assert (plan.start_row, plan.end_row, plan.files) == (0, 200, 4 + 2)
    assert (plan.reason, plan.at_row) == (pb.SHORTFALL_WINDOW_MISSING, 300)
    plan = prepared(matched(*both(300)), memory_rows=130).plan
    assert (plan.start_row, plan.end_row, plan.files, plan.reason) == (128, 300, 3 + 2, 0)


def test_without_windows_nothing_is_planned() -> None:
    for found, least in ((matched(), 1), (matched(*both(128)), 129)):
        plan = prepared(found, min_tokens=least).plan
        assert (plan.end_row, plan.files) == (0, 0)
        assert (plan.reason, plan.at_row) == (pb.SHORTFALL_WINDOW_MISSING, 300)


def test_states_are_missing_behind_the_last_checkpoint() -> None:
    plan = prepared(matched(*both(200)), at_checkpoints=True).plan
    assert (plan.end_row, plan.reason, plan.at_row) == (200, pb.SHORTFALL_STATE_MISSING, 200)
    plan = prepared(matched(), at_checkpoints=True, memory_rows=5).plan
    assert (plan.files, plan.reason, plan.at_row) == (0, pb.SHORTFALL_STATE_MISSING, 5)


def test_the_gate_compares_seconds() -> None:
    copying = int(DEFAULT_COPY_RATE / 2)  # bytes of half a second
    assert restore_pays(1, 1 << 40, 1e9, 0, 0)  # nothing is measured
    assert restore_pays(1000, copying, 0.4, 1000, 0)
    assert not restore_pays(1000, copying, 0.6, 1000, 0)
    assert not restore_pays(1000, copying, 0.4, 1000, DEFAULT_COPY_RATE / 2)
    assert drifted(0) == 0  # the first restore says what it is
    assert 1e9 < drifted(1e9) < DEFAULT_COPY_RATE
    assert drifted(3e9) == 3e9
