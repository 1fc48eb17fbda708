"""`tiering why` through a sidecar, over both wires: what made-up clients are known to do is found,
shown and cured, and nothing is said of prompts that are as they should be.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering import cli
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.places import short_directory
from tests.sidecar import SidecarProcess
from tests.unit.models.vocabularies import NORMAL, vocabulary_file
from tests.unit.sidecar.ollama_models import name_model
from tests.unit.sidecar.wires import RATE, GoWire, SocketWire, Wire
from tests.unit.why.clients import CASES, SOUND, TOKENS, Case, encode

WIRES = {"gRPC": GoWire, "engine socket": SocketWire}
_numbers = itertools.count(1)


class Asker:
    """Has a model of its own, so that no test sees what another one did."""

    def __init__(
        self, daemon: SidecarProcess, kind: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        number = next(_numbers)
        self.model = f"model{number}:latest"
        models = daemon.root / "models"
        file = vocabulary_file(
            models / "blobs" / "new", [*TOKENS, (f"of its own {number}", NORMAL)]
        )
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        self.file = file.rename(file.with_name(f"sha256-{digest}"))
        name_model(models, self.model, self.file.name)
        self.daemon, self.kind = daemon, kind
        self.wire: Wire = kind(daemon, self.file)
        self._capsys = capsys

    def why(self, *options: str, model: str | None = None) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main(["why", model or self.model, *options])
        out, err = self._capsys.readouterr()
        assert caught.value.code == 0, err
        return out

    def found(self, *options: str) -> list[dict[str, Any]]:
        document = json.loads(self.why("--json", *options))
        assert document["version"] == 1
        partings: list[dict[str, Any]] = document["partings"]
        return partings

    def turn(self, text: str, **how: int) -> int:
        """A prompt is asked for, computed, and stored."""
        tokens = encode(text)
        found = self.wire.ask(tokens, **how)
        self.wire.store(tokens)
        return found


@pytest.fixture(scope="module")
def running() -> Iterator[SidecarProcess]:
    with short_directory() as directory, SidecarProcess(directory) as daemon:
        yield daemon


@pytest.fixture(params=list(WIRES))
def asker(
    running: SidecarProcess,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Asker]:
    for name in [name for name in os.environ if name.startswith(("OLLAMA", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(running.root))
    monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(running.socket))
    monkeypatch.setenv("OLLAMA_MODELS", f"{running.root}/models")
    one = Asker(running, WIRES[request.param], capsys)
    yield one
    one.wire.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_client_is_known_to_do_is_named_shown_and_cured(asker: Asker, case: Case) -> None:
    asker.turn(case.stored)
    at = asker.turn(case.asked)
    (found,) = asker.found()
    assert found["verdict"] == case.verdict
    assert (found["part"] or "", found["turn"]) == (case.part, case.turn)
    assert case.what in found["what"]
    assert case.shown[0] in found["stored_text"]
    assert case.shown[1] in found["prompt_text"]
    if case.cure:
        assert case.cure in found["cure"]
        assert found["source"]
    assert found["at_token"] == at
    assert found["computed_tokens"] == len(encode(case.asked)) - at
    assert found["is_fault"]
    if case.verdict != "other_prompt":
        assert 64 <= found["lost_tokens"] <= found["computed_tokens"]
    assert found["lost_seconds"] == pytest.approx(found["lost_tokens"] / RATE)


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_a_prompt_without_a_fault(asker: Asker, name: str) -> None:
    stored, asked = SOUND[name]
    asker.turn(stored)
    asker.turn(asked)
    assert not any(one["is_fault"] for one in asker.found())
    assert asker.why().startswith("nothing that was stored had to be computed again since ")


def test_a_prompt_that_is_in_memory_has_parted_from_nothing(asker: Asker) -> None:
    asker.turn(CASES[0].stored)
    tokens = encode(CASES[0].asked)
    asker.wire.ask(tokens, memory=len(tokens) - 1)
    asker.wire.ask(tokens, memory=len(tokens) - 70)  # it has more than the store
    assert asker.found() == []
