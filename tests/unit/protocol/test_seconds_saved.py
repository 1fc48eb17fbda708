"""Seconds saved: what computing would have taken less what restoring took, or not measured yet."""

from __future__ import annotations

import pytest

from ollama_tiering.protocol.seconds_saved import Saved, duration, tokens_per_second
from ollama_tiering.sidecar.ledger import Counts


def use(
    restored: int = 0, seconds: float = 0.0, computed: int = 0, computing: float = 0.0
) -> Counts:
    return Counts(
        restored_tokens=restored,
        restore_seconds=seconds,
        prefill_tokens=computed,
        prefill_seconds=computing,
    )


def test_it_is_the_time_of_computing_less_that_of_restoring() -> None:
    saved = Saved.of([use(184_320, 3.1, 2410, 10.0)])
    assert saved.compute_seconds == pytest.approx(184_320 / 241)
    assert saved.seconds == pytest.approx(184_320 / 241 - 3.1)
    assert saved.words() == (
        "saved 12 min 42 s: 184,320 tokens restored in 3.1 s, computing them takes about "
        "12 min 45 s at 241 tokens/s"
    )


def test_a_slow_restore_is_said_as_it_is() -> None:
    saved = Saved.of([use(1000, 5.0, 1000, 2.0)])
    assert saved.seconds == -3
    assert saved.words().startswith("saved -3.0 s: 1,000 tokens restored in 5.0 s")
    failed = Saved.of([use(0, 0.5)])
    assert failed.seconds == -0.5
    assert failed.words() == "saved -0.50 s: 0 tokens restored in 0.50 s"


@pytest.mark.parametrize("unmeasured", [use(500, 0.1), use(500, 0.1, 100), use(500, 0.1, 0, 2.0)])
def test_without_a_measured_speed_none_is_made_up(unmeasured: Counts) -> None:
    assert tokens_per_second(unmeasured) is None
    saved = Saved.of([unmeasured])
    assert saved.seconds is None
    assert saved.words() == "saved: not measured yet (500 tokens restored)"


def test_in_all_only_what_was_measured_is_counted_and_the_rest_is_said() -> None:
    slow, fast, unmeasured = use(100, 1, 10, 1), use(100, 1, 100, 1), use(700, 0.1)
    saved = Saved.of([slow, fast, unmeasured])
    assert saved.seconds == pytest.approx(10 - 1 + 1 - 1)  # each at its own speed
    assert saved.words().endswith("(without 700 restored tokens: not measured yet)")
    assert (saved.restored_tokens, saved.restore_seconds) == (200, 2)


def test_nothing_restored_saves_nothing() -> None:
    assert Saved.of([]).words() == "saved: nothing restored yet"
    assert Saved.of([use(0, 0, 100, 1)]).seconds == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0.00 s"),
        (0.123, "0.12 s"),
        (-0.5, "-0.50 s"),
        (3.14, "3.1 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (760, "12 min 40 s"),
        (3599.7, "1 h 0 min"),
        (7530, "2 h 5 min"),
        (-760, "-12 min 40 s"),
    ],
)
def test_times_are_said_in_words(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_look_ups_that_found_nothing_and_cost_nothing_visible_are_no_loss() -> None:
    """Never `saved -0.00 s`."""
    assert Saved.of([use(0, 0.004, 0, 0.0)]).words() == "saved: nothing restored yet"
    assert Saved.of([use(0, 0.006, 0, 0.0)]).words().startswith("saved -0.01 s: 0 tokens")
