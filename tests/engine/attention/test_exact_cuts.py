"""How engine 2 (csrc/shim) cuts the cells of an operation for csrc's kernels (cut.cpp), and where
these find K and V (places.cpp).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.attention.exact_op import LATE, MOST, Case, changed_binary, error, run

# A GPU of 128 places, so that no run has as many splits as it would like to have.
# Queries: cells, and splits.
SPLITS = {1: (512, 8), 100: (1024, 8), 512: (512, 2), 600: (640, 2)}


@pytest.mark.parametrize("n_q", SPLITS)
def test_the_splits_of_a_run_follow_from_the_run_alone(
    exact_binary: Path, tmp_path: Path, n_q: int
) -> None:
    """Not from the largest batch that there may be."""
    cells, splits = SPLITS[n_q]
    inputs = Case(n_q=n_q, new=n_q, heads=2, kv_heads=1, cells=cells).inputs()
    found = [
        run(exact_binary, tmp_path, inputs, "h", reserved=reserved, FAKEGPU_MULTIPROCESSORS=64)
        for reserved in (0, 2048)
    ]
    kernel = "pa_decode" if n_q == 1 else "pa_wide"
    assert [ran.grids for ran in found] == [[(kernel, splits)]] * 2
    assert found[0].layers.tobytes() == found[1].layers.tobytes()


@pytest.fixture(scope="module")
def rounds_binary(
    exact_binary: Path, binary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """With splits of at most 128 cells, and states of 8 queries: so that few cells are many rounds,
    as 16,384 are for 512 queries.
    """
    return changed_binary(
        exact_binary,
        binary,
        tmp_path_factory.mktemp("rounds"),
        ("cut.cpp", "kSplitMost = 4096", "kSplitMost = 128"),
        ("exact.h", "kQueries = 512", "kQueries = 8"),
    )


ROUNDS = {
    "prefill": (Case(n_q=40, new=40, cells=600), [2] * 3),
    "prefill with sinks": (Case(n_q=70, new=70, cells=512, sinks=True), [2] * 2),
    "a few queries": (Case(n_q=6, new=6, cells=1000), [2] * 4),
    "decode": (Case(cells=1000), [8]),
    "prefill of 256 values": (Case(d=256, n_q=20, new=20, cells=600), [2] * 3),
    "prefill in q8_0": (Case(kind="q8_0", n_q=33, new=33, cells=400), [2] * 2),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_what_has_more_splits_than_states_is_exact_in_rounds(
    rounds_binary: Path, tmp_path: Path, name: str
) -> None:
    case, splits = ROUNDS[name]
    inputs = case.inputs()
    ran = run(rounds_binary, tmp_path, inputs, "hp")
    assert ran.code == 0, ran.said
    counts = [count for _, count in ran.grids]
    assert counts[: len(splits)] == splits, "a launch for each round"
    assert sum(counts) == 2 * sum(splits), "as many splits in pieces"
    assert ran.layers[0].tobytes() == ran.layers[1].tobytes(), "where K/V lie changes bits"
    found = error(ran.layers[0], inputs.answer(ran.k, ran.v))
    print(f"{name}: error {found:.2e}")
    assert found <= MOST


COPIED = " bytes copied by the driver"


@pytest.mark.parametrize(("prefetch", "places"), [("1", 4), ("0", 3)])
def test_a_page_table_is_copied_once_and_not_for_each_attention(
    exact_binary: Path, tmp_path: Path, prefetch: str, places: int
) -> None:
    """Two layers of four lie in staging memory, for one layer or for two."""
    inputs = Case(n_q=3, new=3, cells=64).inputs()
    ran = run(exact_binary, tmp_path, inputs, "pphh", runs=3, OLLAMA_PAGED_PREFETCH=prefetch)
    assert ran.attended == 4 * 3
    assert ran.log.count(COPIED) == places
    assert [layer.tobytes() for layer in ran.layers] == [ran.layers[0].tobytes()] * 4


def test_a_page_table_that_is_full_begins_again(
    exact_binary: Path, binary: Path, tmp_path: Path
) -> None:
    """An entry is written over that kernels have read, and is no longer taken for what it was.
    Layers in turn have K/V of two types, so that no other's will do.
    """
    small = changed_binary(
        exact_binary, binary, tmp_path, ("places.cpp", "kPlaces = 1024", "kPlaces = 2")
    )
    places = "HphHp" + "Hh" * 8
    case = Case(kind="q8_0", n_q=3, new=3, cells=64)
    expected = {
        kind: run(exact_binary, tmp_path, replace(case, kind=kind).inputs(), "h")
        .layers[0]
        .tobytes()
        for kind in ("f16", "q8_0")
    }
    ran = run(small, tmp_path, case.inputs(), places, runs=2, **LATE["all are"])
    assert ran.code == 0, ran.said
    assert ran.log.count(COPIED) == 2 * len(places)
    wanted = [expected["f16" if place.isupper() else "q8_0"] for place in places]
    assert [layer.tobytes() for layer in ran.layers] == wanted
