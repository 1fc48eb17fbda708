"""A model in several files: what is in each of them is in the name of what is stored. No row that
was computed with one changed part is restored for another.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.damaged_file import flip_bit, put_right
from tests.engine_llama_server.parts import place_in, split
from tests.engine_llama_server.server import LlamaServer, Starter
from tests.engine_llama_server.test_damaged_model import stored, wait_reason
from tests.engine_llama_server.test_llama_server import blocks_of, report, text, wait_stored
from tests.engine_llama_server.test_states import settled
from tests.sidecar import SidecarProcess

PROMPT = 300
COUNT = 3
OPTIONS = ("-fa", "on", "-np", "1", "-c", "2048")


@pytest.fixture
def rng() -> random.Random:
    return random.Random(29)


@pytest.fixture
def parts(model: Callable[[str], Path], tmp_path: Path) -> list[Path]:
    return split(model("llama-tiny"), tmp_path / "parts", COUNT)


def contents(sidecar: SidecarProcess) -> set[str]:
    """What the names of all that is stored say of the files."""
    found = sidecar.ram_dir.rglob("namespace.json")
    extras = [json.loads(path.read_text())["extra"] for path in found]
    parts = [part.partition("=") for extra in extras for part in extra.split(";")]
    return {value for name, _, value in parts if name == "content"}


@pytest.mark.parametrize("shape", ["llama-tiny", "lfm2-tiny"])
def test_after_a_kill_the_answer_is_that_of_the_resident_cache(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    model: Callable[[str], Path],
    tmp_path: Path,
    shape: str,
) -> None:
    whole = model(shape)
    files = split(whole, tmp_path / "parts", COUNT)
    prompt, more = text(rng, PROMPT), text(rng, 40, first=3)
    resident = start(files[0], *OPTIONS)
    first = resident.complete(prompt)
    second = [*prompt, *first.tokens, *more]
    hit = resident.complete(second)
    assert hit.cached == len(second) - len(more) - 1  # the last token of an answer has no row yet
    resident.kill()

    tiered = start(files[0], *OPTIONS, sidecar=sidecar)
    assert tiered.complete(prompt) == first
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    settled(sidecar, tiered)
    tiered.kill()
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    assert contents(sidecar) == {",".join(digests)}

    again = start(files[0], *OPTIONS, sidecar=sidecar)
    assert again.complete(second) == hit
    assert report(sidecar, again, 1).restored_tokens == hit.cached
    again.kill()
    plain = start(whole, *OPTIONS, sidecar=sidecar)  # the same weights, in one file
    assert plain.complete(prompt) == first


@pytest.mark.parametrize("which", range(COUNT))
def test_what_was_computed_with_another_part_is_not_found(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, parts: list[Path], which: int
) -> None:
    prompt = text(rng, PROMPT)
    data = parts[which].read_bytes()

    def ask(stored_before: int) -> tuple[int, int]:
        """Cached tokens, and restored ones."""
        server = start(parts[0], *OPTIONS, sidecar=sidecar)
        cached = server.complete(prompt).cached
        restored = report(sidecar, server, 1).restored_tokens
        wait_stored(sidecar, server, stored_before)
        server.kill()
        return cached, restored

    assert ask(blocks_of(PROMPT)) == (0, 0)
    flip_bit(parts[which], data, place_in(parts[which]))
    assert ask(2 * blocks_of(PROMPT)) == (0, 0)
    put_right(parts[which], data)
    assert ask(2 * blocks_of(PROMPT)) == (PROMPT - 1, PROMPT - 1)


def test_a_part_of_another_model_is_another_model(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, parts: list[Path], tmp_path: Path
) -> None:
    """The first file, with the vocabulary, is the same."""
    other = tmp_path / parts[0].name.replace(f"-00001-of-{COUNT:05}", "")
    make_model(make_shape("llama-tiny"), other, seed=1)
    others = split(other, tmp_path / "others", COUNT)
    prompt = text(rng, PROMPT)
    tiered = start(parts[0], *OPTIONS, sidecar=sidecar)
    cold = tiered.complete(prompt)
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    tiered.kill()
    others[2].replace(parts[2])
    mixed = start(parts[0], *OPTIONS, sidecar=sidecar)
    said = mixed.complete(prompt)
    assert said.cached == 0
    assert said != cold  # else nothing could go wrong


def test_a_part_that_changes_under_a_server_ends_what_is_stored_and_restored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, parts: list[Path]
) -> None:
    """It is mapped: what was written to it is in the weights from then on."""
    prompts = [text(rng, PROMPT, first=first) for first in (5, 6, 7)]
    server = start(parts[0], *OPTIONS, sidecar=sidecar)
    for prompt in prompts[:2]:
        server.complete(prompt)
    assert server.complete(prompts[0]).cached == PROMPT - 1  # restored: the slot held the other one
    wait_stored(sidecar, server, 2 * blocks_of(PROMPT))
    settled(sidecar, server)
    before = stored(sidecar)
    flip_bit(parts[1], parts[1].read_bytes(), place_in(parts[1]))
    server.complete(prompts[2])
    wait_reason(sidecar, server, "changed after it was loaded")
    assert server.complete(prompts[1]).cached == 0
    server.complete(prompts[2])
    assert stored(sidecar) == before


@pytest.mark.parametrize("which", range(COUNT))
def test_a_part_that_is_lacking_or_another_one_before_the_first_prompt_is_refused_by_name(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, parts: list[Path], which: int
) -> None:
    """Nobody knows which of the two was loaded."""
    server = start(parts[0], *OPTIONS, sidecar=sidecar)
    if which == 1:
        parts[which].unlink()
    else:
        put_right(parts[which], parts[which].read_bytes())
    server.complete(text(rng, PROMPT))
    wait_reason(sidecar, server, "the model's file is another one than when it was loaded")
    assert stored(sidecar) == 0


def test_a_name_that_only_looks_like_a_part_is_one_file(
    sidecar: SidecarProcess,
    rng: random.Random,
    patched: Path,
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    path = tmp_path / "best-of-both.gguf"
    path.write_bytes(model("llama-tiny").read_bytes())
    prompt, engine = text(rng, PROMPT), sidecar.socket.with_name("s.engine")
    for cached in (0, PROMPT - 1):
        with LlamaServer(patched, path, tmp_path / "log", *OPTIONS, sidecar=engine) as server:
            assert server.complete(prompt).cached == cached
            wait_stored(sidecar, server, blocks_of(PROMPT))
