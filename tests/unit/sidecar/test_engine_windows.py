"""Windows over the engine socket: a prompt goes on where enough of them follow one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ollama_tiering.client.engine_client import EngineRefused
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import FakeEngine, hello, prompt
from tests.places import short_directory
from tests.sidecar import SidecarProcess

ROW = 160  # bytes of a position in all windows
WINDOWS = hello(states=True, min_tokens=1, window_row_bytes=ROW, window_least=65, window_most=200)


@pytest.fixture(scope="module")
def daemon() -> Iterator[SidecarProcess]:
    with short_directory() as directory, SidecarProcess(directory) as running:
        yield running


@pytest.fixture
def windowed(daemon: SidecarProcess) -> Iterator[FakeEngine]:
    with FakeEngine(daemon.socket, WINDOWS) as connected:
        yield connected


def test_a_match_ends_where_windows_without_a_gap_do(windowed: FakeEngine) -> None:
    tokens = prompt(30_000, 400)
    files, reasons = windowed.store(tokens, windows=[192, 256, 320, 384])
    assert reasons == []
    assert [(f.first_position, f.rows) for f in files if f.kind == m.FileKind.WINDOW] == [
        *((192, 64), (256, 64), (320, 64), (384, 16))
    ]
    assert windowed.restore([*tokens, 1]) == 400
    assert windowed.restore(tokens) == 399  # its last token is computed
    assert windowed.restore([*tokens[:350], 1]) == 350  # within a block
    assert windowed.restore([*tokens[:257], 1]) == 257  # with all 65 rows before it
    assert windowed.look_up([*tokens[:256], 1]).reason == pb.SHORTFALL_STATE_MISSING
    assert windowed.look_up([*tokens[:150], 1]).rows == 0
    found = windowed.look_up([*tokens, 1])
    kept = [file.first_position for file in found.files if file.kind == m.FileKind.WINDOW]
    assert kept == [256, 320, 384]  # 208 rows would be more than the engine keeps
    assert windowed.store(tokens, windows=[192, 256, 320, 384]) == ([], [])
    with pytest.raises(EngineRefused):
        windowed.store(tokens, windows=[32])


def test_a_gap_in_the_windows_ends_what_they_serve(windowed: FakeEngine) -> None:
    tokens = prompt(31_000, 400)
    windowed.store(tokens, windows=[64, 128, 192, 320])
    assert windowed.restore([*tokens, 1]) == 256
    assert windowed.restore([*tokens[:384], 1]) == 256
    assert windowed.restore([*tokens[:200], 1]) == 200


def test_of_a_state_and_windows_that_counts_which_reaches_further(windowed: FakeEngine) -> None:
    tokens = prompt(32_000, 300)
    windowed.store(tokens, {150: b"a", 290: b"b"}, windows=[0, 64, 128])
    assert windowed.restore([*tokens, 1]) == 290
    assert windowed.restore([*tokens[:250], 1]) == 192
    found = windowed.look_up([*tokens[:150], 1])
    assert {file.kind for file in found.files} == {m.FileKind.ROWS, m.FileKind.WINDOW}


def test_where_fewer_rows_lie_before_it_the_engine_goes_on_at_a_state_only(
    windowed: FakeEngine,
) -> None:
    tokens = prompt(32_500, 300)
    windowed.store(tokens, {40: b"a"}, windows=[0, 64, 128])
    assert windowed.restore([*tokens[:65], 1]) == 65
    assert windowed.restore([*tokens[:64], 1]) == 40
    assert windowed.restore([*tokens[:39], 1]) == 0


def test_a_longer_tail_has_its_own_window(windowed: FakeEngine) -> None:
    tokens = prompt(33_000, 230)
    windowed.store(tokens[:210], windows=[64, 128, 192])
    windowed.store(tokens, windows=[64, 128, 192])
    assert windowed.restore([*tokens, 1]) == 230
    # Of the shorter one again: its rows are in the longer block, and so is its window.
    assert windowed.store(tokens[:210], windows=[64, 128, 192]) == ([], [])
    assert windowed.restore([*tokens[:210], 1]) == 210


@pytest.mark.parametrize(
    ("row", "least", "most"),
    [(0, 65, 200), (160, 0, 200), (160, 201, 200), (17 << 20, 65, 200), (160, 65, 2 << 20)],
)
def test_windows_that_make_no_sense_are_refused(
    daemon: SidecarProcess, row: int, least: int, most: int
) -> None:
    said = hello(states=True, window_row_bytes=row, window_least=least, window_most=most)
    with pytest.raises(EngineRefused):
        FakeEngine(daemon.socket, said)


def test_windows_need_an_engine_with_states(daemon: SidecarProcess) -> None:
    with pytest.raises(EngineRefused):
        FakeEngine(daemon.socket, replace(WINDOWS, states=False))
