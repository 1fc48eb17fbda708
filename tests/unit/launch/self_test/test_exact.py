"""What the self-test does not let pass of exact attention, with made-up servers; the real ones are
in tests/engine_ollama_llama_server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.errors import ResultDiffers, TieringError
from ollama_tiering.launch.llama_server import Completed
from ollama_tiering.launch.self_test import checks, exact, run
from ollama_tiering.launch.self_test.checks import SelfCheck
from ollama_tiering.launch.self_test.pair import ServerPair
from ollama_tiering.launch.self_test.store import NotTiered
from ollama_tiering.patchset.llama_server.installation import InstalledOllama, ServerBuild
from ollama_tiering.patchset.llama_server.links import EXACT
from ollama_tiering.patchset.report import Report

F16, STORE = exact.ALL[0], exact.ALL[-1]
TOP = ((5, -1.0), (6, -2.0))
STEPS = ((5, -1.0, *TOP), (7, -1.5, *TOP))
WHOLE = Completed(0, (5, 7), STEPS)
HIT = Completed(300, (5, 7), STEPS)
LAST = Completed(0, (8,), STEPS[-1:])
OTHER = Completed(0, (5, 7), (STEPS[0], (7, -1.5000001, *TOP)))
FAR = Completed(0, (5, 7), ((5, -1.2, (5, -1.2), (6, -2.0)), STEPS[1]))
NOTHING = Completed(0, (), ())


class MadeUpPair(ServerPair):
    """Stock answers `stock`; each server with exact attention the next of `said`."""

    def __init__(self, folder: Path, stock: Completed, *said: Sequence[Completed]) -> None:
        side = InstalledOllama(folder / "ollama", folder)
        super().__init__("check", side, side, folder, (), folder, self)  # type: ignore[arg-type]
        self._stock, self._said = stock, iter(said)
        self.pid = os.getpid()
        self.asked: list[tuple[str, ...]] = []

    @contextmanager
    def stock(self) -> Iterator[Any]:
        self._answers = iter((self._stock,))
        yield self

    tiered = stock

    @contextmanager
    def exact(self, *options: str, tiered: bool = False) -> Iterator[Any]:
        self.asked.append((*options, *(("tiered",) if tiered else ())))
        self._answers = iter(next(self._said))
        yield self

    def complete(self, _prompt: object, _count: int) -> Completed:
        return next(self._answers)

    def wait(self, _server: object, blocks: int) -> None:
        assert blocks == 5

    def kill(self) -> None:
        self.asked.append(("kill",))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_require_loaded", lambda _server: None)


ONE = (WHOLE, HIT, NOTHING, HIT)  # whole, a hit, what comes between, another hit
CUT = (LAST, HIT)


@pytest.mark.usefixtures("loaded")
def test_the_same_bits_pass(tmp_path: Path) -> None:
    pair = MadeUpPair(tmp_path, WHOLE, ONE, CUT)
    F16.run(pair)
    assert pair.asked == [(), ("-ub", "64", "-t", "2", "-tb", "2")]


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("stock", "one", "cut", "said"),
    [
        (FAR, ONE, CUT, "differs from stock's by 0.200"),
        (Completed(0, (1,), ((1, -1.0, (1, -1.0)),)), ONE, CUT, "in all of the best tokens"),
        (WHOLE, (WHOLE, OTHER), CUT, "other bits: a hit that leaves one token"),
        (WHOLE, (*ONE[:3], OTHER), CUT, "other bits: a hit that leaves some"),
        (WHOLE, ONE, (OTHER, HIT), "other bits: an answer that is read as a prompt"),
        (WHOLE, ONE, (LAST, OTHER), "other bits: parts of 64, two threads"),
    ],
)
def test_what_differs_does_not(
    tmp_path: Path,
    stock: Completed,
    one: Sequence[Completed],
    cut: Sequence[Completed],
    said: str,
) -> None:
    with pytest.raises(ResultDiffers, match=said):
        F16.run(MadeUpPair(tmp_path, stock, one, cut))


def test_a_server_that_computes_with_another_library_is_noticed(tmp_path: Path) -> None:
    """This process has no such library."""
    with pytest.raises(ResultDiffers, match=f"does not compute with {EXACT}"):
        F16.run(MadeUpPair(tmp_path, WHOLE, ONE, CUT))


BEFORE, AFTER = (WHOLE, HIT), (HIT,)


def test_from_the_store_as_in_memory(tmp_path: Path) -> None:
    pair = MadeUpPair(tmp_path, NOTHING, BEFORE, (WHOLE,), AFTER)
    STORE.run(pair)
    assert pair.asked == [(), ("tiered",), ("kill",), ("tiered",)]


@pytest.mark.parametrize(
    ("stock", "said", "why"),
    [
        (NOTHING, (BEFORE, (OTHER,), AFTER), "other bits: with the store"),
        (NOTHING, (BEFORE, (WHOLE,), (Completed(300, HIT.tokens, OTHER.bits),)), "restored after"),
        (NOTHING, (BEFORE, (WHOLE,), (WHOLE,)), "0 tokens of the prompt were not computed"),
        (HIT, (BEFORE, (WHOLE,), AFTER), "stock's attention got 300 rows of the exact one"),
        (NOTHING, ((WHOLE, WHOLE), (WHOLE,), AFTER), "stock had 0 tokens in memory"),
    ],
)
def test_what_comes_back_otherwise(
    tmp_path: Path, stock: Completed, said: Sequence[Sequence[Completed]], why: str
) -> None:
    with pytest.raises(ResultDiffers, match=why):
        STORE.run(MadeUpPair(tmp_path, stock, *said))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstalledOllama:
    monkeypatch.setattr(InstalledOllama, "version", lambda _self: "v0.40.0")
    monkeypatch.setattr(InstalledOllama, "build", lambda _self: ServerBuild(1, "abc"))
    monkeypatch.setattr(run, "require_same_devices", lambda *_: [])
    monkeypatch.setattr(run, "_AT_ONCE", 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    @contextmanager
    def store(_folder: Path) -> Iterator[None]:
        yield

    monkeypatch.setattr(run, "TrialStore", store)
    monkeypatch.setattr(
        run, "_models", lambda _, all_: {(one.shape, one.dtype): tmp_path for one in all_}
    )
    (tmp_path / "lib").mkdir()
    return InstalledOllama(tmp_path / "ollama", tmp_path / "lib")


def checks_do(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    ran: list[str] = []

    def passes(_pair: ServerPair) -> None:
        ran.append("rows")

    def does(_pair: ServerPair) -> None:
        ran.append("exact")
        if error:
            raise error

    def made(of: SelfCheck, run_: Any) -> SelfCheck:
        return SelfCheck(of.name, of.kind, of.shape, of.options, run_, dtype=of.dtype)

    monkeypatch.setattr(checks, "SHORT", (made(checks.SHORT[0], passes),))
    monkeypatch.setattr(exact, "ALL", (made(F16, does),))
    return ran


def test_a_tree_that_has_none_is_not_asked_for_it(
    tree: InstalledOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = checks_do(monkeypatch, ResultDiffers("other bits"))
    outcome = run.self_test(tree, tree, False, Report(quiet=True))
    assert (ran, outcome.not_exact) == (["rows"], "")


@pytest.mark.parametrize("error", [None, ResultDiffers("other bits"), NotTiered("other bits")])
def test_where_it_fails_the_tree_serves_without_it(
    tree: InstalledOllama, monkeypatch: pytest.MonkeyPatch, error: TieringError | None
) -> None:
    (tree.lib / EXACT).touch()
    ran = checks_do(monkeypatch, error)
    outcome = run.self_test(tree, tree, False, Report(quiet=True))
    assert ran == ["rows", "exact"]
    assert dict(outcome.refused) == {}, "it is no kind of models"
    assert outcome.not_exact == (f"{F16.name}: other bits" if error else "")
    assert outcome.checks == (1 if error else 2)
