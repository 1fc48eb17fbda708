"""Models with a projector of images beside them, as llava: what comes before the first image of a
prompt is tiered like any text.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.engine.additions import PATCHES, make_image, make_projector
from tests.engine.conftest import MODELS
from tests.engine.harness import (
    Result,
    Server,
    Sidecar,
    assert_same,
    in_memory,
    result_of,
    text,
    wait_until,
)

BASE, MODEL = "llama", "llava"
BEFORE, BEHIND = 300, 60  # tokens around the image


@pytest.fixture(scope="module")
def llava(binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """BASE with a projector: the same file of weights."""
    folder = tmp_path_factory.mktemp("projector")
    path = folder / "projector.gguf"
    make_projector(path, MODELS[BASE], 0)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with Server(binary, folder / "maker", models) as server:
        server.post(f"/api/blobs/sha256:{digest}", content=path.read_bytes())
        files = {"llama.gguf": server.blob(BASE).replace("-", ":"), path.name: f"sha256:{digest}"}
        server.post("/api/create", json={"model": MODEL, "files": files, "stream": False})
    return MODEL


def ask(server: Server, prompt: str, image: str) -> Result:
    """`[img-0]` in the prompt is where the image comes."""
    before = len(server.loads())
    body = server.body(MODEL, prompt) | {"images": [image]}
    answer = server.post("/api/generate", json=body)
    load = wait_until("the runner's line", lambda: server.loads()[before:], 5.0)[-1]
    return result_of(answer, load.used, 0.0)


def test_text_is_restored_whether_a_projector_is_loaded_or_not(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, llava: str
) -> None:
    prompt = text(BEFORE, "text")
    env = {"OLLAMA_MAX_LOADED_MODELS": 1}
    with Server(binary, tmp_path / "reference", models, env=env) as reference:
        expected = in_memory(reference, llava, prompt, BEFORE - 1)
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket, env=env) as server:
        for number, name in enumerate((BASE, llava, BASE)):
            answer = server.generate(name, prompt)
            assert bool(answer.resumed) == bool(number)
            if number:
                assert_same(answer, expected, name)
            sidecar.settle(server, name)
            server.unload(name)
        assert [restore.tokens for restore in server.restores()] == [BEFORE - 1] * 2


def test_what_comes_before_an_image_is_restored_and_nothing_behind_it(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, llava: str
) -> None:
    start = text(BEFORE, "start")
    prompt = start + "[img-0]" + text(BEHIND, "end")
    images = [make_image(seed) for seed in (1, 2)]
    with Server(binary, tmp_path / "reference", models) as reference:
        expected = []
        for image in images:
            reference.generate(llava, start + text(100, image), predict=1)
            expected.append(ask(reference, prompt, image))
        again = ask(reference, prompt, images[-1])
    assert [answer.resumed for answer in expected] == [BEFORE] * 2
    assert expected[0].prompt_tokens == BEFORE + PATCHES + BEHIND
    assert expected[0].logprobs != expected[1].logprobs
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        assert ask(server, prompt, images[0]).resumed == 0
        for image, reference_answer in zip(images, expected, strict=True):
            server.unload(llava)  # returns when everything has been stored
            assert_same(ask(server, prompt, image), reference_answer)
        # In memory an image is found as in stock.
        assert again.resumed == BEFORE + PATCHES + BEHIND - 1
        assert_same(ask(server, prompt, images[-1]), again)
        assert [restore.tokens for restore in server.restores()] == [BEFORE] * 2
