"""Engine 2 over K/V in pinned memory, delivered in pieces through a ring of two slots
(csrc/shim/pieces.cpp), operation by operation: the bits of a run over K/V on the device.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.attention.exact_op import (
    FAILED,
    LATE,
    MOST,
    Case,
    Inputs,
    Ran,
    changed_binary,
    error,
    run,
)

SLOW = pytest.mark.slow
WHOLE = {"OLLAMA_PAGED_RING": "0"}
# So that a few hundred cells are many pieces, as 64K are: splits of 128 cells at the most, and
# slots of 64 KiB, which is 128 cells of 512 bytes; of larger ones, what a split needs.
SMALL = (
    ("cut.cpp", "kSplitMost = 4096", "kSplitMost = 128"),
    ("cut.cpp", "kSlotBytes = 32 << 20", "kSlotBytes = 64 << 10"),
)
ROUNDS = (*SMALL, ("exact.h", "kQueries = 512", "kQueries = 8"))  # states of so many queries
# Of two pieces, so that a piece with new rows has the slot that one of the layer before had; and of
# three, so that it has the slot of one of its own layer.
SHORT = (Case(n_q=3, new=3, cells=256), Case(n_q=3, new=3, cells=384))
SEED = {"FAKEGPU_SEED": "5"}


@pytest.fixture(scope="module")
def ring_binary(exact_binary: Path, binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_binary(exact_binary, binary, tmp_path_factory.mktemp("ring"), *SMALL)


def _same(ran: Ran, expected: bytes) -> list[bool]:
    return [layer.tobytes() == expected for layer in ran.layers]


def _expected(binary: Path, folder: Path, inputs: Inputs) -> bytes:
    """Of K/V on the device: nothing is copied."""
    return run(binary, folder, inputs, "h").layers[0].tobytes()


def _copied(lines: str) -> list[int]:
    """Bytes of each copy over the bus."""
    return [int(size) for size in re.findall(r"(\d+) bytes copied from pinned memory", lines)]


# Splits of each piece of a layer whose new rows are its last cells.
PIECES = {
    "decode": (Case(cells=1000), [1] * 8),
    "decode of what fills no unit": (Case(cells=650), [1] * 6),
    "decode with sinks and a soft-cap": (Case(cells=700, sinks=True, softcap=20.0), [1] * 6),
    "prefill": (Case(n_q=40, new=40, cells=600), [1] * 5),
    "prefill of all that there is": (
        Case(n_q=300, new=300, cells=300, heads=2, kv_heads=1),
        [2, 1],
    ),
    "256 values": (Case(d=256, cells=400), [1] * 4),
    "q8_0": (Case(kind="q8_0", cells=600), [1] * 5),
    "q8_0, rows of 2-byte alignment": (
        Case(kind="q8_0", d=96, heads=6, kv_heads=3, cells=400),
        [1] * 4,
    ),
    "K and V of two types": (Case(kind="q8_0/q4_0", cells=500), [2, 1, 1]),
    "nothing new": (Case(cells=500, new=0, causal=False), [1] * 4),
}


@pytest.mark.parametrize("prefetch", ["1", pytest.param("0", marks=SLOW)])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_give_the_bits_of_a_whole_run(
    ring_binary: Path, tmp_path: Path, name: str, prefetch: str
) -> None:
    case, pieces = PIECES[name]
    inputs = case.inputs()
    ran = run(ring_binary, tmp_path, inputs, "phup", runs=2, OLLAMA_PAGED_PREFETCH=prefetch)
    assert ran.code == 0, ran.said
    assert [splits for _, splits in ran.grids[: len(pieces)]] == pieces
    assert len({layer.tobytes() for layer in ran.layers}) == 1, "where K/V lie changes bits"
    found = error(ran.layers[0], inputs.answer(ran.k, ran.v))
    print(f"{name}: error {found:.2e}")
    assert found <= MOST
    whole = run(ring_binary, tmp_path, inputs, "pu", **WHOLE)
    assert [splits for _, splits in whole.grids] == [sum(pieces)] * 2
    assert all(_same(whole, ran.layers[0].tobytes()))


@pytest.mark.parametrize("prefetch", ["1", pytest.param("0", marks=SLOW)])
@pytest.mark.parametrize(
    "case", [Case(n_q=40, new=40, cells=600), Case(n_q=6, new=6, cells=1000, sinks=True)], ids=str
)
def test_pieces_of_a_run_in_rounds_join_as_its_rounds_do(
    exact_binary: Path, binary: Path, tmp_path: Path, case: Case, prefetch: str
) -> None:
    rounds = changed_binary(exact_binary, binary, tmp_path, *ROUNDS)
    inputs = case.inputs()
    ran = run(rounds, tmp_path, inputs, "phu", OLLAMA_PAGED_PREFETCH=prefetch, **LATE["all are"])
    assert ran.code == 0, ran.said
    assert len(ran.grids) > 2 * 4
    assert len({layer.tobytes() for layer in ran.layers}) == 1
    assert error(ran.layers[0], inputs.answer(ran.k, ran.v)) <= MOST


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("prefetch", ["1", pytest.param("0", marks=SLOW)])
def test_no_stream_reads_what_another_has_yet_to_write(
    ring_binary: Path, tmp_path: Path, late: str, prefetch: str
) -> None:
    """Slots before their copies, copies before the rows, and copies into slots that are read."""
    env = LATE[late] | SEED | {"OLLAMA_PAGED_PREFETCH": prefetch}
    for case in (*SHORT, replace(SHORT[1], new_at=200)):
        inputs = case.inputs()
        expected = _expected(ring_binary, tmp_path, inputs)
        ran = run(ring_binary, tmp_path, inputs, "ppuhpp", **env)
        assert _same(ran, expected) == [True] * 6, case


def test_pieces_below_the_new_rows_are_copied_before_these_are_written(
    ring_binary: Path, tmp_path: Path
) -> None:
    """And all of them after, where a write does not say which rows these are."""
    inputs = Case(cells=512).inputs()
    row, split = 4 * 64, 128  # bytes of K or V of a cell; cells
    for places, first in (("p", [split * row] * 4), ("u", [])):
        log = run(ring_binary, tmp_path, inputs, places).log
        assert _copied(log) == [split * row] * 8
        before, graph, _ = log.partition(": graph of ")
        assert graph
        assert _copied(before) == first


@pytest.mark.parametrize(("prefetch", "slots"), [("1", 2), ("0", 1)])
def test_the_ring_takes_the_memory_of_its_slots_however_many_cells_there_are(
    exact_binary: Path, ring_binary: Path, tmp_path: Path, prefetch: str, slots: int
) -> None:
    """Whole layers in their place take all of K and V."""
    inputs = Case(cells=2048).inputs()

    def taken(binary: Path, size: int, **env: str) -> int:
        ran = run(binary, tmp_path, inputs, "ppp", OLLAMA_PAGED_PREFETCH=prefetch, **env)
        assert ran.code == 0
        return len(re.findall(rf": allocation \d+ of {size} bytes", ran.log))

    row = 256
    assert taken(ring_binary, 128 * row) == 2 * slots
    assert taken(ring_binary, 2048 * row) == 0
    assert taken(ring_binary, 2048 * row, **WHOLE) == 2 * slots
    assert taken(exact_binary, 2048 * row) == 2 * slots, "no more than there is"


# A mirror of 300 cells, which ends within the third split: cells that cross the bus in the first
# graph, which fills it, and in each other one.
MIRRORED = {
    "new rows beyond it": (Case(n_q=3, new=3, cells=640), 300 + 384, 340),
    "new rows on both sides of its end": (Case(n_q=3, new=500, cells=640), 300 + 340, 160 + 340),
    "new rows in the middle of it": (
        Case(n_q=3, new=30, new_at=150, cells=640),
        300 + 340,
        30 + 340,
    ),
    "no row beyond it": (Case(n_q=3, new=3, cells=300), 300, 0),
}


@pytest.mark.parametrize("prefetch", ["1", pytest.param("0", marks=SLOW)])
@pytest.mark.parametrize("name", MIRRORED)
def test_what_mirrors_have_is_attended_there(
    ring_binary: Path, tmp_path: Path, name: str, prefetch: str
) -> None:
    case, first, then = MIRRORED[name]
    inputs = case.inputs()
    expected = _expected(ring_binary, tmp_path, inputs)
    env = {"OLLAMA_PAGED_MIRROR": "300", "OLLAMA_PAGED_PREFETCH": prefetch}
    for late in ("our stream is late", "the copies are late", "the stock stream is late"):
        ran = run(ring_binary, tmp_path, inputs, "pp", runs=3, **env, **LATE[late], **SEED)
        assert ran.code == 0, ran.said
        assert "have a mirror on CUDA0" in ran.said
        assert _same(ran, expected) == [True] * 2
        assert sum(_copied(ran.log)) == 2 * 512 * (first + 2 * then)


def test_a_kind_that_its_kernels_do_not_serve_is_staged_whole_beside_the_ring(
    ring_binary: Path, tmp_path: Path
) -> None:
    inputs = Case(kind="q4_0", n_q=3, new=3, cells=384).inputs()
    expected = [run(ring_binary, tmp_path, inputs, at).layers[0].tobytes() for at in ("H", "h")]
    assert expected[0] != expected[1]
    for late in LATE:
        ran = run(ring_binary, tmp_path, inputs, "PpPPpp", **LATE[late], **SEED)
        assert ran.code == 0, ran.said
        found = [layer.tobytes() for layer in ran.layers]
        assert found == [expected[place == "p"] for place in "PpPPpp"], late


@pytest.mark.parametrize("prefetch", ["1", "0"])
def test_a_launch_that_fails_between_pieces_fails_the_graph_and_is_said(
    ring_binary: Path, tmp_path: Path, prefetch: str
) -> None:
    inputs = SHORT[1].inputs()
    env = {"FAKEGPU_FAIL_LAUNCH": "2", "OLLAMA_PAGED_PREFETCH": prefetch}
    ran = run(ring_binary, tmp_path, inputs, "p", **env)
    assert ran.code == FAILED
    assert "failed on CUDA0: cuLaunchKernel: unspecified launch failure (719)" in ran.said


def test_without_memory_for_a_second_slot_pieces_come_in_turn_and_that_is_said(
    ring_binary: Path, tmp_path: Path
) -> None:
    inputs = SHORT[1].inputs()
    log = run(ring_binary, tmp_path, inputs, "pp").log
    taken = re.findall(r": allocation (\d+) of (\d+) bytes", log)
    slots = [int(number) for number, size in taken if int(size) == 128 * 256]
    assert len(slots) == 4
    expected = _expected(ring_binary, tmp_path, inputs)
    ran = run(ring_binary, tmp_path, inputs, "pp", FAKEGPU_FAIL_ALLOC=slots[3])
    assert ran.said.count("no memory on CUDA0 for K/V of a second piece") == 1
    assert _same(ran, expected) == [True] * 2
    ran = run(ring_binary, tmp_path, inputs, "pp", FAKEGPU_FAIL_ALLOC=slots[1])
    assert ran.code == FAILED


AHEAD, IN_TURN = {"OLLAMA_PAGED_PREFETCH": "1"}, {"OLLAMA_PAGED_PREFETCH": "0"}
MUTANTS: dict[str, tuple[tuple[str, str, str], dict[str, str]]] = {
    "a slot is filled before it was read": (
        (
            "attention.cpp",
            "if (copy.turn >= 2) copier_->iface.event_wait(copier_, slot.drained);",
            "",
        ),
        AHEAD | LATE["our stream is late"],
    ),
    "a piece is copied before its rows are written": (
        ("attention.cpp", "if (after) copier_->iface.event_wait(copier_, written_);", ""),
        AHEAD | LATE["the stock stream is late"],
    ),
    "a slot is read before it was filled": (
        ("pieces.cpp", "bad = exact_->wait(slot.filled)", "bad = GGML_STATUS_SUCCESS"),
        AHEAD | LATE["the copies are late"],
    ),
    "a slot counts as read before it was": (
        ("pieces.cpp", "bad = exact_->record(slot.drained)", "bad = GGML_STATUS_SUCCESS"),
        AHEAD | LATE["our stream is late"],
    ),
    "a piece is queued before its rows are": (
        ("attention.cpp", " || (after && copy.layer >= n_written_)", ""),
        AHEAD | LATE["the stock stream is late"],
    ),
    "writes that say nothing pass for none": (
        (
            "mirror.cpp",
            "if (!tag_of(write, &tag) || write->nb[1] != row_bytes(seen)) return 0;",
            "if (!tag_of(write, &tag)) continue;",
        ),
        AHEAD | LATE["the stock stream is late"],
    ),
    "the highest cell that is written passes for the lowest": (
        (
            "mirror.cpp",
            "lowest = static_cast<size_t>(tag.lowest)",
            "lowest = static_cast<size_t>(tag.highest) + 1",
        ),
        AHEAD | LATE["the stock stream is late"],
    ),
    "in turn, a slot is filled before it was read": (
        ("pieces.cpp", "bad = exact_->lead()", "bad = GGML_STATUS_SUCCESS"),
        IN_TURN | LATE["our stream is late"],
    ),
    "in turn, a slot is read before it was filled": (
        ("pieces.cpp", "bad = exact_->follow()", "bad = GGML_STATUS_SUCCESS"),
        IN_TURN | LATE["the stock stream is late"],
    ),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if number < 2 else SLOW) for number, fault in enumerate(MUTANTS)],
)
def test_without_one_of_its_rules_other_bits_come_out(
    exact_binary: Path, binary: Path, tmp_path: Path, fault: str
) -> None:
    """Else the tests of late streams would prove nothing of it."""
    change, env = MUTANTS[fault]
    wrong = changed_binary(exact_binary, binary, tmp_path, *SMALL, change)
    found = []
    for case in SHORT:
        inputs = case.inputs()
        expected = _expected(wrong, tmp_path, inputs)
        found += _same(run(wrong, tmp_path, inputs, "ppuhpp", **env, **SEED), expected)
    assert not all(found), f"nobody noticed: {fault}"


MIRROR_MUTANTS = {
    "the mirror does not get new rows": (
        "copies.cpp",
        "part.trusted < end ? end : std::min(part.high, end);",
        "part.trusted < end ? end : 0;",
    ),
    "the mirror does not get what it did not have": (
        "copies.cpp",
        "part.trusted < end ? end : std::min(part.high, end);",
        "std::min(part.high, end);",
    ),
    "a piece comes out of the mirror before that has it": (
        "copies.cpp",
        "piece && piece->from == From::after ?",
        "piece ?",
    ),
    "the mirror catches up after the rows count as written": (
        "pieces.cpp",
        "    catch_up(node, use);\n    compute_->iface.event_record(compute_, written_);\n",
        "    compute_->iface.event_record(compute_, written_);\n    catch_up(node, use);\n",
    ),
}


@SLOW
@pytest.mark.parametrize("fault", MIRROR_MUTANTS)
def test_without_one_of_the_rules_of_mirrors_other_bits_come_out(
    exact_binary: Path, binary: Path, tmp_path: Path, fault: str
) -> None:
    wrong = changed_binary(exact_binary, binary, tmp_path, *SMALL, MIRROR_MUTANTS[fault])
    found = []
    for case, *_ in MIRRORED.values():
        inputs = case.inputs()
        expected = _expected(wrong, tmp_path, inputs)
        env = {"OLLAMA_PAGED_MIRROR": "300"} | LATE["the stock stream is late"] | SEED
        for runs in (1, 3):
            found += _same(run(wrong, tmp_path, inputs, "pp", runs=runs, **env), expected)
    assert not all(found), f"nobody noticed: {fault}"
