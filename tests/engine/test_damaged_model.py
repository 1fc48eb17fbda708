"""A model whose file is damaged, and later put right under the same name: no row of the damaged
weights is restored for the right ones, whichever bit it was, and the time of the file says nothing.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
from pathlib import Path

import gguf
import pytest

from ollama_tiering.models.make import make_model
from tests.damaged_file import flip_bit, put_right
from tests.engine.additions import make_adapter
from tests.engine.conftest import MODELS
from tests.engine.harness import Result, Server, Sidecar, assert_same, in_memory, text, wait_until

PROMPT_TOKENS = 300
NAMES = {"go": "g2", "llamacpp": "llama"}


class Model:
    """A model in a folder of its own, whose file the test damages and puts right."""

    def __init__(self, binary: Path, folder: Path, shape: str) -> None:
        folder.mkdir()
        made = folder / "made.gguf"
        make_model(MODELS[shape], made)
        self.data = made.read_bytes()
        self.store = folder / "store"
        with Server(binary, folder / "maker", self.store) as server:
            server.create("m", made)
            self.blob = self.store / "blobs" / server.blob("m")
        self.places = _places(made, self.data)

    def damage(self, at: int) -> None:
        flip_bit(self.blob, self.data, at)

    def repair(self) -> None:
        put_right(self.blob, self.data)


def _places(path: Path, data: bytes) -> dict[str, int]:
    """Bytes of the file that decide rows."""
    reader = gguf.GGUFReader(path)
    tensors = sorted(reader.tensors, key=lambda one: int(one.data_offset))
    first, middle, last = tensors[0], tensors[len(tensors) // 2], tensors[-1]
    key = next(name for name in reader.fields if name.endswith(".rope.freq_base"))
    value = struct.pack("<f", reader.fields[key].contents())
    return {
        "header": data.index(value, data.index(key.encode())) + 1,
        "first byte of a tensor": int(first.data_offset),
        "middle": int(middle.data_offset) + int(middle.n_bytes) // 2,
        "last byte of a tensor": int(last.data_offset) + int(last.n_bytes) - 1,
        "last byte": len(data) - 1,
    }


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, binary: Path, tmp_path: Path) -> Model:
    return Model(binary, tmp_path / "model", NAMES[request.param])


def _stored(sidecar: Sidecar) -> int:
    return sum(tier.blocks for tier in sidecar.stat().tiers)


def _wait_refused(sidecar: Sidecar, server: Server, name: str) -> None:
    pid = server.runner_pid(name)
    wait_until("the damage is said", lambda: "is damaged" in sidecar.report(pid).reason)


@pytest.mark.timeout(600)
def test_rows_of_a_damaged_model_are_never_restored_for_the_right_one(
    binary: Path, model: Model, tmp_path: Path, sidecar: Sidecar
) -> None:
    expected: dict[str, tuple[Result, Result]] = {}
    with Server(binary, tmp_path / "reference", model.store) as reference:
        for where in model.places:
            prompt = text(PROMPT_TOKENS, where)
            cold = in_memory(reference, "m", prompt, 0)
            expected[where] = cold, in_memory(reference, "m", prompt, PROMPT_TOKENS - 1)
    with Server(binary, tmp_path / "tested", model.store, socket=sidecar.socket) as server:
        for where, at in model.places.items():
            prompt, before = text(PROMPT_TOKENS, where), _stored(sidecar)
            model.damage(at)
            server.generate("m", prompt)
            pid = server.runner_pid("m")
            _wait_refused(sidecar, server, "m")
            assert not sidecar.report(pid).tiered
            server.unload("m")
            assert _stored(sidecar) == before, f"{where}: rows of damaged weights are stored"
            model.repair()
            right = server.generate("m", prompt)
            assert_same(right, expected[where][0], where)
            sidecar.settle(server, "m")
            server.unload("m")
            assert _stored(sidecar) > before, f"{where}: the first conversation is lost"
            again = server.generate("m", prompt)
            assert_same(again, expected[where][1], where)
            sidecar.settle(server, "m")
            server.unload("m")
        assert "is damaged" in server.log_text()


def test_a_damaged_adapter_is_refused_and_its_model_is_not(
    binary: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    model = Model(binary, tmp_path / "model", "llama")
    adapter = tmp_path / "adapter.gguf"
    make_adapter(adapter, MODELS["llama"], 1)
    data = adapter.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    prompt = text(PROMPT_TOKENS, "adapter")
    with Server(binary, tmp_path / "tested", model.store, socket=sidecar.socket) as server:
        server.post(f"/api/blobs/sha256:{digest}", content=data)
        request = {"model": "a", "from": "m", "adapters": {adapter.name: f"sha256:{digest}"}}
        server.post("/api/create", json=request | {"stream": False})
        blob = model.store / "blobs" / f"sha256-{digest}"
        with blob.open("r+b") as file:
            file.seek(len(data) - 8)
            file.write(bytes((data[-8] ^ 4,)))
        server.generate("a", prompt)
        _wait_refused(sidecar, server, "a")
        assert _stored(sidecar) == 0
        server.unload("a")
        server.generate("m", prompt)
        sidecar.settle(server, "m")
        assert _stored(sidecar) > 0


def test_the_first_token_does_not_wait_for_a_file_that_cannot_be_read(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """The sidecar is stopped: it reads nothing, and answers nobody."""
    prompt = text(PROMPT_TOKENS, "hangs")
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        assert sidecar.process is not None
        subprocess.run(["kill", "-STOP", str(sidecar.process.pid)], check=True)
        try:
            assert server.generate("g2", prompt).resumed == 0
        finally:
            subprocess.run(["kill", "-CONT", str(sidecar.process.pid)], check=True)
        sidecar.settle(server, "g2")
        wait_until("the conversation is stored", lambda: _stored(sidecar))
