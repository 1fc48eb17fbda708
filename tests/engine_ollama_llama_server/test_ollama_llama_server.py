"""The real `ollama serve` with the tree of links: what an unloaded, swapped or killed model knew
comes back with the bits of stock's own cache in memory; and nothing installed is touched.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.self_test import checks, exact, self_test, store
from ollama_tiering.patchset.llama_server import guard, link_tree, links, parts
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.report import Report
from ollama_tiering.protocol.engine.wire import VERSION
from tests.engine_ollama_llama_server.conftest import SHAPES, SOURCE
from tests.engine_ollama_llama_server.servers import Place, Stock, Up

CHARACTERS = 700  # the models' tokens are characters, or a little more
OURS = {guard.COPY, "libllama-server-impl.so"}


def text(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return "".join(chr(rng.randrange(97, 123)) for _ in range(count))


START = text(1, CHARACTERS)
ENDS = [f"{digit}{text(digit, 40)}" for digit in (2, 3, 4)]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("model", SHAPES)
def test_after_an_unload_and_after_a_kill_the_bits_are_those_of_the_resident_cache(
    start_stock: Callable[..., Stock], start_up: Callable[..., Up], model: str
) -> None:
    stock = start_stock()
    cold, hit, second_hit = (stock.generate(model, START + end) for end in ENDS)
    stock.kill()

    up = start_up()
    assert up.generate(model, START + ENDS[0]) == cold
    up.wait_stored(10)
    up.unload(model)
    assert up.generate(model, START + ENDS[1]) == hit
    (runner,) = up.runners()
    assert up.restored([runner.pid]) >= CHARACTERS * 9 // 10

    daemon, pids = up.daemon(), [one.pid for one in up.runners()]
    daemon.send_signal(signal.SIGKILL)
    runner.send_signal(signal.SIGKILL)
    assert up.process is not None
    assert up.process.wait(60) == 9  # it says that the server ended
    again = start_up()
    assert again.generate(model, START + ENDS[2]) == second_hit
    (runner,) = again.runners()
    assert runner.pid not in pids
    assert again.restored([runner.pid]) >= CHARACTERS * 9 // 10


def test_two_models_that_take_each_others_place(
    start_stock: Callable[..., Stock], start_up: Callable[..., Up]
) -> None:
    stock = start_stock(OLLAMA_MAX_LOADED_MODELS="2")
    cold = [stock.generate(model, START + ENDS[0]) for model in SHAPES]
    hits = [stock.generate(model, START + ENDS[1]) for model in SHAPES]
    assert len(stock.runners()) == 2
    stock.kill()

    up = start_up(OLLAMA_MAX_LOADED_MODELS="1")
    for turn, wanted in enumerate((cold, hits)):
        for number, model in enumerate(SHAPES):
            assert up.generate(model, START + ENDS[turn]) == wanted[number], model
            (runner,) = up.runners()
            assert (up.restored([runner.pid]) > 0) == (turn == 1)
            up.wait_stored(10 * (number + 1 if turn == 0 else len(SHAPES)))


def test_a_killed_daemon_leaves_no_llama_server(start_up: Callable[..., Up]) -> None:
    """Stock leaves it running, with all its memory, because nobody asks it to end."""
    up = start_up()
    up.generate(SHAPES[0], ENDS[0])
    (runner,) = up.runners()
    up.daemon().send_signal(signal.SIGKILL)
    assert up.process is not None
    up.process.wait(60)
    # Where nobody collects orphans, what is left of it is only its entry in the table.
    assert not runner.is_running() or runner.status() == psutil.STATUS_ZOMBIE


def test_one_file_is_ours_and_no_installed_one_is_written(
    start_up: Callable[..., Up], installed: Path, tree: Path
) -> None:
    before = digests(installed)
    up = start_up()
    up.generate(SHAPES[0], START)
    (runner,) = up.runners()
    mapped = {Path(one.path) for one in runner.memory_maps() if one.path.startswith("/")}
    lib = tree / "lib/ollama"
    assert {path.name for path in mapped if path.is_relative_to(tree)} == OURS
    assert (lib / guard.COPY).read_bytes() == (installed / "lib/ollama/llama-server").read_bytes()
    computes = {path for path in mapped if path.name.startswith(("libggml", "libllama", "libmtmd"))}
    others = {path for path in computes if path.name not in OURS}
    assert len(others) >= 5
    assert all(path.is_relative_to(installed.resolve()) for path in others)
    assert "LLAMA_ARG_CACHE_RAM" not in runner.environ()  # our library turns the cache off
    up.kill()
    assert digests(installed) == before


def test_a_cache_of_prompts_that_the_user_wants_stays(start_up: Callable[..., Up]) -> None:
    up = start_up(LLAMA_ARG_CACHE_RAM="64")
    up.generate(SHAPES[0], START)
    (runner,) = up.runners()
    assert runner.environ()["LLAMA_ARG_CACHE_RAM"] == "64"


def test_without_the_variable_the_tree_answers_as_stock(
    start_stock: Callable[..., Stock], tree: Path, place: Place
) -> None:
    answers = []
    for program in (None, tree / "bin/ollama"):
        server = start_stock(program)
        answers.append([server.generate(SHAPES[0], START + end) for end in ENDS])
        (runner,) = server.runners()
        assert "OLLAMA_KV_TIER_ENGINE_SOCKET" not in runner.environ()
        of_tree = any(one.path.startswith(str(tree)) for one in runner.memory_maps())
        assert of_tree == (program is not None)
        server.kill()
    assert answers[0] == answers[1]


def lay_tree(made: LinkTree, copy: Path, cache: Path) -> LinkTree:
    """A tree for a copy of what is installed, with the library that was compiled for that."""
    found = InstalledOllama(copy / "bin/ollama", copy / "lib/ollama")
    state, folder = found.state(), cache / "llama-server/copied"
    library = made.lib / "libllama-server-impl.so"
    own = made.lib / links.EXACT if made.exact else None
    links.lay(folder, links.entries(found, state, made.version, library, exact=own))
    there = parts.of(folder, found)
    other = replace(made, folder=folder, program=str(found.program), state=state, parts=there)
    (folder / link_tree.RECORD).write_text(link_tree.text_of(other))
    name_source(folder, "/nowhere")  # so that it is not fetched
    return other


def name_source(folder: Path, source: str) -> None:
    """As --llama-source did when the tree was made."""
    noted = {"named_source": source, "protocol": VERSION}
    (folder / "made.json").write_text(json.dumps(noted), encoding="utf-8")


@pytest.fixture
def copied(installed: Path, tree: Path, tmp_path: Path) -> Path:
    """A copy of what is installed, and in `cache` beside it a tree as if made for it."""
    copy = tmp_path / "ollama"
    shutil.copytree(installed, copy, symlinks=True)
    made = link_tree.read(tree)
    assert made is not None
    lay_tree(made, copy, tmp_path / "cache")
    return copy


def exact_checks(tree: Path) -> int:
    """How many there are of exact attention, which not every processor can have."""
    return len(exact.ALL) if (tree / links.LIB / links.EXACT).exists() else 0


def require_stock(up: Up, installed: Path) -> None:
    (runner,) = up.runners()
    assert Path(runner.exe()) == installed / "lib/ollama/llama-server"
    assert "OLLAMA_KV_TIER_ENGINE_SOCKET" not in runner.environ()
    assert "LLAMA_ARG_CACHE_RAM" not in runner.environ()


def test_an_ollama_that_was_updated_is_stock_if_it_cannot_be_patched_again(
    start_up: Callable[..., Up], copied: Path
) -> None:
    (copied / "lib/ollama/libllama.so").touch()
    up = start_up(copied, OLLAMA_TIERING_CACHE=str(copied.with_name("cache")))
    said = up.log.read_text()
    assert "serves as stock" in said
    assert "cannot be patched: " in said
    assert "/nowhere" in said
    up.generate(SHAPES[0], START)
    require_stock(up, copied)


def test_an_ollama_that_is_updated_meanwhile_takes_over_as_stock(
    start_up: Callable[..., Up], copied: Path
) -> None:
    up = start_up(copied, OLLAMA_TIERING_CACHE=str(copied.with_name("cache")))
    daemon = up.daemon()
    assert Path(daemon.exe()) == copied.with_name("cache") / "llama-server/copied/bin/ollama"
    up.generate(SHAPES[0], START)
    server = copied / "lib/ollama/llama-server"
    server.rename(server.with_name("new"))  # an installer is at work
    up.wait(lambda: "was updated or changed" in up.log.read_text(), "it is noticed")
    up.generate(SHAPES[0], START)  # what is loaded goes on
    assert daemon.is_running()
    server.with_name("new").rename(server)
    (copied / "lib/ollama/libllama.so").touch()
    up.wait(lambda: "going over to the installed Ollama" in up.log.read_text(), "it goes over")
    up.wait(lambda: not daemon.is_running() and up.is_answering(), "the other one answers")
    up.generate(SHAPES[0], START)
    require_stock(up, copied)
    up.wait(lambda: "Ollama goes on as stock" in up.log.read_text(), "no tree can be made")


@pytest.mark.slow
@pytest.mark.timeout(1500, func_only=True)
def test_an_ollama_that_is_updated_meanwhile_is_patched_again(
    start_up: Callable[..., Up], copied: Path
) -> None:
    """It serves as stock until then; what was stored before is computed anew, by other files."""
    assert SOURCE is not None
    cache = copied.with_name("cache")
    name_source(cache / "llama-server/copied", SOURCE)
    up = start_up(copied, OLLAMA_TIERING_CACHE=str(cache))
    up.generate(SHAPES[0], START)
    (copied / "lib/ollama/libllama.so").touch()
    up.wait(lambda: "until `tiering patch` has made a tree" in up.log.read_text(), "it goes over")
    up.wait(up.is_answering, "the installed one answers")
    up.generate(SHAPES[0], START)
    require_stock(up, copied)
    up.unload(SHAPES[0])
    up.wait(lambda: "which is patched as" in up.log.read_text(), "it is patched again", 1200)
    up.wait(up.is_answering, "the new tree answers")
    up.generate(SHAPES[0], START)
    (runner,) = up.runners()
    assert Path(runner.exe()).is_relative_to(cache)
    assert "OLLAMA_KV_TIER_ENGINE_SOCKET" in runner.environ()
    up.wait_stored(1)


def test_an_update_while_it_serves_makes_the_next_llama_server_stock(
    start_up: Callable[..., Up], copied: Path
) -> None:
    """Our library never meets libraries that it was not compiled for."""
    cache = copied.with_name("cache")
    other = link_tree.read(cache / "llama-server/copied")
    assert other is not None
    up = start_up(copied, OLLAMA_TIERING_CACHE=str(cache))
    before = up.generate(SHAPES[0], START)
    (runner,) = up.runners()
    assert Path(runner.exe()) == other.lib / guard.COPY
    (copied / "lib/ollama/libllama.so").touch()
    up.unload(SHAPES[0])
    assert up.generate(SHAPES[0], START) == before
    require_stock(up, copied)
    (runner,) = up.runners()
    assert not any(one.path.startswith(str(other.folder)) for one in runner.memory_maps())
    logs = "".join(path.read_text(errors="replace") for path in up.logs())
    assert "this model is served as stock" in logs


def test_a_library_that_does_not_tier_fails_the_self_test(
    installed: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_STORE_SECONDS", 3.0)
    lib = tmp_path / "tree/lib/ollama"
    shutil.copytree(tree / "lib/ollama", lib, symlinks=True)
    (lib / "libllama-server-impl.so").unlink()
    shutil.copyfile(
        installed / "lib/ollama/libllama-server-impl.so", lib / "libllama-server-impl.so"
    )
    one = InstalledOllama(installed / "bin/ollama", installed / "lib/ollama")
    other = InstalledOllama(tree / "bin/ollama", lib)
    with pytest.raises(ServiceError, match="stored nothing within"):
        self_test(one, other, False, Report(quiet=True))
    made = InstalledOllama(tree / "bin/ollama", tree / "lib/ollama")
    assert self_test(one, made, False, Report(quiet=True)).checks == 1 + exact_checks(tree)


def test_the_tree_has_passed_all_checks(tree: Path) -> None:
    """Of an archive nobody can tell the commit."""
    made = link_tree.read(tree)
    assert made is not None
    count = len(checks.ALL) + exact_checks(tree)
    assert (made.checks, made.refused) == (count, {})
    assert made.engine.endswith(f"not on the list of tested ones: {count} checks passed")
