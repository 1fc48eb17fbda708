"""A model whose file is damaged, and later put right under the same name: no row of the damaged
weights is restored for the right ones. A blob that is not what its name says is not tiered at all;
the rows of any other file lie under its digest.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from tests.damaged_file import flip_bit, put_right
from tests.engine_llama_server.server import Answer, LlamaServer
from tests.engine_llama_server.test_llama_server import blocks_of, report, text, wait_stored
from tests.engine_llama_server.test_states import settled
from tests.sidecar import SidecarProcess

PROMPT = 300
OPTIONS = ("-fa", "on", "-np", "1", "-c", "2048")
NAMES = {"a blob": "sha256-{digest}", "a file": "model.gguf"}


class Model:
    """A file in a folder of its own, which the test damages and puts right."""

    def __init__(self, made: Path, folder: Path, name: str) -> None:
        self.data = made.read_bytes()
        self.path = folder / name.format(digest=hashlib.sha256(self.data).hexdigest())
        self.path.write_bytes(self.data)

    def places(self) -> dict[str, int]:
        """Bytes of weights that every prompt goes through."""
        found = {one.name: one for one in gguf.GGUFReader(self.path).tensors}
        first, last = found["blk.0.attn_v.weight"], found["output_norm.weight"]
        return {
            "first": int(first.data_offset) + int(first.n_bytes) // 2 + 1,
            "last": int(last.data_offset) + int(last.n_bytes) - 2,
        }

    def damage(self, at: int) -> None:
        flip_bit(self.path, self.data, at)

    def repair(self) -> None:
        put_right(self.path, self.data)


def stored(sidecar: SidecarProcess) -> int:
    return sum(one.blocks for one in sidecar.stat().namespaces)


def wait_reason(sidecar: SidecarProcess, server: LlamaServer, reason: str) -> None:
    assert server.process is not None
    pid = server.process.pid
    sidecar.wait(
        lambda stat: any(one.pid == pid and reason in one.reason for one in stat.runners),
        f"the sidecar says: {reason}",
        30,
    )


@pytest.fixture
def rng() -> random.Random:
    return random.Random(28)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("place", ["first", "last"])
def test_rows_of_damaged_weights_are_not_restored_for_the_right_ones(
    kind: str,
    place: str,
    sidecar: SidecarProcess,
    rng: random.Random,
    patched: Path,
    stock: Path,
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    loaded = Model(model("llama-tiny"), tmp_path, NAMES[kind])
    engine, log = sidecar.socket.with_name("s.engine"), tmp_path / "log"
    prompt = text(rng, PROMPT, first=5)

    with LlamaServer(stock, loaded.path, log, *OPTIONS) as resident:
        cold, warm = resident.complete(prompt), resident.complete(prompt)
    assert (cold.cached, warm.cached) == (0, PROMPT - 1)

    loaded.damage(loaded.places()[place])
    with LlamaServer(patched, loaded.path, log, *OPTIONS, sidecar=engine) as damaged:
        assert damaged.complete(prompt) != cold  # else nothing could go wrong
        if kind == "a blob":
            wait_reason(sidecar, damaged, "is damaged")
        else:
            wait_stored(sidecar, damaged, blocks_of(PROMPT))
    if kind == "a blob":
        assert stored(sidecar) == 0
    before = stored(sidecar)

    loaded.repair()
    with LlamaServer(patched, loaded.path, log, *OPTIONS, sidecar=engine) as right:
        assert right.complete(prompt) == cold
        wait_stored(sidecar, right, before + blocks_of(PROMPT))
        settled(sidecar, right)
    with LlamaServer(patched, loaded.path, log, *OPTIONS, sidecar=engine) as again:
        assert again.complete(prompt) == warm
        assert report(sidecar, again, 1).restored_tokens == PROMPT - 1


def test_a_file_that_changes_under_a_server_is_no_longer_served(
    sidecar: SidecarProcess,
    rng: random.Random,
    patched: Path,
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """It is mapped: what was written to it is in the weights from then on."""
    loaded = Model(model("llama-tiny"), tmp_path, NAMES["a blob"])
    engine, log = sidecar.socket.with_name("s.engine"), tmp_path / "log"
    prompts = [text(rng, PROMPT, first=first) for first in (5, 6, 7)]

    def ask(server: LlamaServer, which: int) -> Answer:
        return server.complete(prompts[which])

    with LlamaServer(patched, loaded.path, log, *OPTIONS, sidecar=engine) as server:
        ask(server, 0)
        wait_stored(sidecar, server, blocks_of(PROMPT))
        ask(server, 1)
        assert ask(server, 0).cached == PROMPT - 1  # restored: the slot held the other one
        wait_stored(sidecar, server, 2 * blocks_of(PROMPT))
        settled(sidecar, server)
        before = stored(sidecar)
        loaded.damage(loaded.places()["first"])
        ask(server, 2)  # what there is to store of it is planned after a new look at the file
        wait_reason(sidecar, server, "changed after it was loaded")
        assert ask(server, 1).cached == 0
        ask(server, 2)
        assert stored(sidecar) == before
