"""LoRA adapters: each has rows of its own, and they come back as in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.engine.additions import make_adapter
from tests.engine.conftest import MODELS
from tests.engine.harness import Server, Sidecar, assert_same, in_memory, text
from tests.engine.namespaces import descriptions

BASE = "llama"
ADAPTED = ("llama-one", "llama-other")
PROMPT_TOKENS = 300


@pytest.fixture(scope="module")
def adapters(
    binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Two models that differ from BASE in an adapter each -> digest of the adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    digests = {}
    with Server(binary, folder / "maker", models) as server:
        for seed, name in enumerate(ADAPTED):
            path = folder / f"{name}.gguf"
            make_adapter(path, MODELS[BASE], seed)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            server.post(f"/api/blobs/sha256:{digest}", content=path.read_bytes())
            request = {"model": name, "from": BASE, "adapters": {path.name: f"sha256:{digest}"}}
            server.post("/api/create", json=request | {"stream": False})
            digests[name] = digest
    return digests


def test_each_adapter_finds_its_own_rows_only(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, adapters: dict[str, str]
) -> None:
    """The model file is the same. One runner at a time: they are told apart by that file."""
    prompt = text(PROMPT_TOKENS, "adapters")
    env = {"OLLAMA_MAX_LOADED_MODELS": 1}
    names = (BASE, *adapters)
    expected = {}
    with Server(binary, tmp_path / "reference", models, env=env) as reference:
        for name in names:
            expected[name] = in_memory(reference, name, prompt, PROMPT_TOKENS - 1)
            reference.unload(name)
    assert len({result.logprobs for result in expected.values()}) == len(names)
    resumed = []
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket, env=env) as server:
        for name in names * 2:
            answer = server.generate(name, prompt)
            resumed.append(answer.resumed)
            if answer.resumed:
                assert_same(answer, expected[name], name)
            sidecar.settle(server, name)
            server.unload(name)
    assert resumed == [0] * len(names) + [PROMPT_TOKENS - 1] * len(names)
    said = {description["adapters"] for description in descriptions(sidecar)}
    assert said == {"", *(f"sha256-{digest}" for digest in adapters.values())}
