"""A router of several models: what each knew outlives its unload, its kill and a restart of all,
with the bits of its own cache in memory, and no model gets another one's rows.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ollama_tiering.launch import block_service
from ollama_tiering.launch.router_models import name_of
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.engine_llama_server.router import Router, preset, waiting_client
from tests.engine_llama_server.server import Answer, Starter, alike
from tests.engine_llama_server.test_llama_server import blocks_of, text
from tests.llama_command import LlamaCommand
from tests.places import short_directory

PROMPT = 300
LONG = 5380
ONE = ("-fa", "on", "-np", "1", "-c", "2048")
LARGE = ("-fa", "on", "-np", "1", "-c", "8192", "-b", "128", "-ub", "128")
SETTINGS = {
    "OLLAMA_KV_TIER_MIN_TOKENS": "1",
    "OLLAMA_KV_TIER_GATE": "restore",
    "OLLAMA_KV_TIER_PROGRESS_SECONDS": "3600",
}


@pytest.fixture
def rng() -> random.Random:
    return random.Random(30)


@pytest.fixture
def command() -> Iterator[LlamaCommand]:
    with short_directory() as root, LlamaCommand(root, **SETTINGS) as made:
        yield made


@pytest.fixture
def paths(model: Callable[[str], Path], tmp_path: Path) -> dict[str, Path]:
    """Two kinds of models, and one that differs from the first in its weights alone: even the name
    of its file is the same.
    """
    folder = tmp_path / "models"
    twin = folder / "twin/llama-tiny.gguf"
    twin.parent.mkdir(parents=True)
    make_model(make_shape("llama-tiny"), twin, seed=1)
    for name in ("llama-tiny", "qwen2-tiny"):
        shutil.copy(model(name), folder)
    return {
        "llama-tiny": folder / "llama-tiny.gguf",
        "qwen2-tiny": folder / "qwen2-tiny.gguf",
        "twin": twin,
    }


def source(way: str, paths: dict[str, Path], tmp_path: Path) -> tuple[str, ...]:
    if way == "directory":
        return ("--models-dir", str(paths["llama-tiny"].parent))
    models = {name: {"model": path, "ctx-size": 2048} for name, path in paths.items()}
    return ("--models-preset", str(preset(tmp_path / "models.ini", models)))


def resident(start: Starter, path: Path, before: Sequence[int], then: Sequence[int]) -> Answer:
    """What a server answers that has the first prompt, and its answer, in memory."""
    server = start(path, *ONE)
    server.complete(before)
    said = server.complete(then)
    server.kill()
    return said


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("way", "by"),
    [
        ("directory", "unload"),
        ("directory", "kill"),
        ("directory", "restart"),
        ("preset", "restart"),
    ],
)
def test_each_model_goes_on_with_its_own_rows(
    way: str,
    by: str,
    command: LlamaCommand,
    start: Starter,
    rng: random.Random,
    patched: Path,
    paths: dict[str, Path],
    tmp_path: Path,
) -> None:
    """The same prompts to all of them, and all in one store."""
    prompt, one, other = text(rng, PROMPT), text(rng, 20, first=3), text(rng, 30, first=4)
    wanted = {
        name: resident(start, path, prompt + one, prompt + other) for name, path in paths.items()
    }
    assert len({said.bits for said in wanted.values()}) == len(paths)
    options = (*source(way, paths, tmp_path), *ONE)
    router = Router(command, patched, *options).start()
    for name in paths:
        assert router.complete(prompt + one, model=name).cached == 0
    router.wait_settled()
    assert router.stored() >= len(paths) * blocks_of(PROMPT + 20)
    if by == "restart":
        models = router.models().values()
        assert router.end() == 0
        assert len(models) == len(paths)
        assert all(is_gone(one) for one in models)
        assert block_service.ask(command.socket) is None
        router = Router(command, patched, *options).start()
    else:
        for name in paths:
            router.unload(name) if by == "unload" else router.kill_model(name)
    for name, path in paths.items():
        assert router.complete(prompt + other, model=name) == wanted[name]
        told = router.runner(name)
        assert (told.tiered, told.model, name_of(told.pid)) == (True, path.name, name)
        assert (told.restored_tokens, told.prompt_tokens) == (PROMPT, PROMPT + 30)
    namespaces = {router.runner(name).namespace for name in paths}
    assert len(namespaces) == len(paths)
    assert router.end() == 0


def test_models_that_take_turns_lose_nothing(
    command: LlamaCommand,
    start: Starter,
    rng: random.Random,
    patched: Path,
    paths: dict[str, Path],
    tmp_path: Path,
) -> None:
    """There is room for one: the router ends it for the next, and it stores what it has first."""
    first, second = text(rng, PROMPT), text(rng, 30, first=4)
    options = (*source("directory", paths, tmp_path), "--models-max", "1", *ONE)
    router = Router(command, patched, *options).start()
    names = ("llama-tiny", "twin")
    said = {name: router.complete(first, model=name) for name in names}
    for name in names:
        text_so_far = [*first, *said[name].tokens]
        wanted = resident(start, paths[name], first, [*text_so_far, *second])
        assert router.complete([*text_so_far, *second], model=name) == wanted
        assert set(router.models()) == {name}
        assert router.runner(name).restored_tokens == wanted.cached > PROMPT
    assert router.end() == 0


def test_two_names_of_one_file_share_what_is_stored(
    command: LlamaCommand, rng: random.Random, patched: Path, paths: dict[str, Path], tmp_path: Path
) -> None:
    """The size of the context changes no bit. Nor does the router: a server without one finds it,
    too. Of these two, only one was told how large its own cache of prompts is, so that has it.
    """
    prompt = text(rng, PROMPT)
    models: dict[str, dict[str, object]] = {
        "short": {"model": paths["twin"], "c": 1024},
        "long": {"model": paths["twin"], "c": 2048, "cache-ram": 64},
    }
    options = ("-fa", "on", "-np", "1")
    file = preset(tmp_path / "models.ini", models)
    router = Router(command, patched, "--models-preset", str(file), *options).start()
    assert router.complete([*prompt, 7], model="short").cached == 0
    router.wait_settled()
    assert router.complete([*prompt, 8], model="long").cached == PROMPT
    router.wait_settled()
    assert set(router.models()) == set(models)
    assert router.said_by_models().count("own cache of prompts is off") == 1
    assert router.end() == 0
    alone = Router(command, patched, "-m", str(paths["twin"]), "-c", "4096", *options).start()
    assert alone.complete([*prompt, 9]).cached == PROMPT
    assert alone.end() == 0


def test_the_router_itself_has_nothing_to_do_with_the_store(
    command: LlamaCommand, rng: random.Random, patched: Path, paths: dict[str, Path], tmp_path: Path
) -> None:
    """It is ready without a model, opens nothing, and says nothing of rows."""
    router = Router(command, patched, *source("directory", paths, tmp_path), *ONE).start()
    assert not router.models()
    assert not router.stat().runners
    router.complete(text(rng, PROMPT), model="twin")
    router.runner("twin")
    pids = {one.pid for one in router.stat().runners}
    assert pids == {router.models()["twin"].pid}
    assert router.models()["twin"].net_connections("unix")
    assert not router.router.net_connections("unix")
    assert "kv tiering" not in router.said_by_router()
    assert router.end() == 0


def test_a_request_that_is_computed_at_the_end_is_stored(
    command: LlamaCommand,
    rng: random.Random,
    patched: Path,
    paths: dict[str, Path],
    tmp_path: Path,
) -> None:
    """A router that is to end waits for its clients before it ends a model, if they get nothing
    until all is computed. The model does not wait for that.
    """
    prompt = text(rng, LONG)
    options = (*source("directory", paths, tmp_path), *LARGE)
    router = Router(command, patched, *options).start()
    with waiting_client(router, prompt, 2500, model="twin"):
        router.wait_for(lambda: router.computed("twin") > LONG // 4)
        assert router.stored() == 0
        assert router.process is not None
        router.process.terminate()
        router.wait_for(lambda: "cleaning up before exit" in router.said_by_models(), 25)
    assert router.process.wait(60) == 0
    again = Router(command, patched, *options).start()
    said = again.complete(prompt, 1, model="twin")
    assert LONG // 4 < said.cached < LONG - 1
    assert again.runner("twin").restored_tokens == said.cached
    assert again.end() == 0


@pytest.mark.parametrize("killed", ["the command", "the router"])
def test_no_model_outlives_a_kill(
    killed: str,
    command: LlamaCommand,
    rng: random.Random,
    patched: Path,
    paths: dict[str, Path],
    tmp_path: Path,
) -> None:
    prompt = text(rng, PROMPT)
    options = (*source("directory", paths, tmp_path), *ONE)
    router = Router(command, patched, *options).start()
    router.complete(prompt, model="twin")
    router.wait_settled()
    assert router.process is not None
    whole = [router.router, *router.models().values()]
    assert len(whole) == 2
    if killed == "the command":
        router.process.kill()
    else:
        whole[0].kill()
    code = router.process.wait(60)
    assert code == (-9 if killed == "the command" else 137)
    router.wait_for(lambda: all(is_gone(one) for one in whole), 30)
    again = Router(command, patched, *options).start()
    assert again.complete([*prompt, 7], model="twin").cached == PROMPT
    assert again.end() == 0


def test_a_model_that_sleeps_goes_on_from_the_store(
    command: LlamaCommand,
    start: Starter,
    rng: random.Random,
    patched: Path,
    paths: dict[str, Path],
    tmp_path: Path,
) -> None:
    """And one whose slot gets rows out of a file of stock's goes on from these."""
    prompt, other, third = text(rng, PROMPT), text(rng, 30, first=4), text(rng, 30, first=5)
    wanted = [resident(start, paths["twin"], prompt, prompt + one) for one in (other, third)]
    slots = tmp_path / "slots"
    slots.mkdir()
    more = ("--sleep-idle-seconds", "2", "--slot-save-path", str(slots))
    router = Router(command, patched, *source("directory", paths, tmp_path), *ONE, *more).start()
    router.complete(prompt, model="twin")
    router.slot_file_of("twin", "save", "kept")
    router.wait_settled()
    router.wait_state("twin", "sleeping")
    said = router.complete(prompt + other, model="twin")
    assert said == wanted[0]
    router.unload("twin")
    router.slot_file_of("twin", "restore", "kept")
    assert alike(router.complete(prompt + third, model="twin"), wanted[1])
    router.wait_state("twin", "sleeping")
    assert router.end() == 0


def test_one_that_is_refused_or_broken_harms_no_other(
    command: LlamaCommand,
    model: Callable[[str], Path],
    rng: random.Random,
    patched: Path,
    paths: dict[str, Path],
    tmp_path: Path,
) -> None:
    prompt = text(rng, PROMPT)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(paths["twin"].read_bytes()[:100_000])
    models = {
        "served": {"model": paths["twin"]},
        "refused": {"model": model("gemma3-tiny"), "ctx-checkpoints": 0},
        "broken": {"model": broken},
    }
    options = ("--models-preset", str(preset(tmp_path / "models.ini", models)), *ONE)
    router = Router(command, patched, *options).start()
    for _ in range(2):
        with pytest.raises(AssertionError, match="failed to load"):
            router.complete(prompt, model="broken")
        router.complete(prompt, model="refused")
        router.complete(prompt, model="served")
    refused = router.runner("refused", 0)
    assert (refused.tiered, refused.model) == (False, "gemma3-tiny.gguf")
    assert "checkpoints are turned off" in refused.reason
    router.wait_settled()
    router.kill_model("served")
    assert router.complete([*prompt, 7], model="served").cached == PROMPT
    assert router.runner("served").restored_tokens == PROMPT
    assert router.end() == 0


def test_a_bad_preset_ends_the_sidecar_too(
    command: LlamaCommand, patched: Path, paths: dict[str, Path], tmp_path: Path
) -> None:
    models = {"one": {"model": paths["twin"], "no-such-option": 1}}
    file = preset(tmp_path / "models.ini", models)
    code = command.run("--program", patched, "--", "--models-preset", file, "--port", "0")
    assert code == 1
    assert "option 'no-such-option' not recognized in preset 'one'" in command.said()
    assert block_service.ask(command.socket) is None
