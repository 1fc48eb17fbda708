"""`tiering ls` shows what the user wrote, with a sidecar and without, and only where it may."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering import cli
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.models import vocab
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.parting import AFTER_TOKENS, BEFORE_TOKENS
from ollama_tiering.store.values import Selection
from tests.places import short_directory
from tests.sidecar import PutStream, SidecarProcess
from tests.unit.models.vocabularies import CONTROL, NORMAL, vocabulary_file
from tests.unit.sidecar.ollama_models import blob, name_model

NS = samples.namespace(blob(1), layers=1)
START = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
PROMPTS = (
    f"{START}Why is the sky \x1b[31mblue?<|im_end|>\n",
    f"{START}How do birds fly?<|im_end|>\n<|im_start|>assistant\n{'They flap. ' * 40}",
)
SHOWN = {"Why is the sky [31mblue?", "How do birds fly?"}
VOCABULARY = [(char, NORMAL) for char in vocab.BYTE_TOKENS]
VOCABULARY += [(mark, CONTROL) for mark in vocab.SPECIALS]


class Place:
    def __init__(self, daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]) -> None:
        self.daemon = daemon
        self.models = daemon.root / "models"
        self.vocabulary = vocabulary_file(self.models / "blobs" / blob(1), VOCABULARY)
        name_model(self.models, "qwen3:0.6b", blob(1))
        self._capsys = capsys

    def ls(self, *options: str) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main(["ls", *options])
        out, err = self._capsys.readouterr()
        assert caught.value.code == 0, err
        return out

    def texts(self, *options: str) -> list[Any]:
        return [chain.get("text") for chain in json.loads(self.ls("--json", *options))["chains"]]


@pytest.fixture(params=["sidecar", "files"])
def place(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Place]:
    with short_directory() as directory, SidecarProcess(directory) as daemon:
        for name in [name for name in os.environ if name.startswith(("OLLAMA", "XDG_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(directory))
        monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(daemon.socket))
        monkeypatch.setenv("OLLAMA_KV_TIER_RAM", str(daemon.ram_dir))
        monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL", str(daemon.local_dir))
        monkeypatch.setenv("OLLAMA_MODELS", f"{directory}/models")
        with daemon.channel() as channel:
            for prompt in PROMPTS:
                stream = PutStream(rpc.BlockStoreStub(channel), NS)
                blocks = samples.sequence(NS, vocab.encode(prompt))
                assert all(result.stored for result in stream.put(blocks))
                stream.close()
        daemon.wait_written()
        if request.param == "files":
            daemon.stop()
        yield Place(daemon, capsys)


def test_what_the_user_wrote_is_the_last_column(place: Place) -> None:
    heading, *lines, _ = place.ls().splitlines()
    assert heading.split()[-1] == "TEXT"
    at = heading.index("TEXT")
    assert {line[at:].rstrip() for line in lines} == SHOWN
    assert {line.split()[1] for line in lines} == {"qwen3:0.6b"}
    assert set(place.texts()) == SHOWN


def test_nobody_who_does_not_want_it_gets_it(place: Place) -> None:
    assert "TEXT" not in place.ls("--no-text")
    assert "birds" not in place.ls("--no-text") + place.ls("--json", "--no-text")
    assert place.texts("--no-text") == [None, None]
    assert "birds" not in place.ls("--blocks") + place.ls("--blocks", "--json")


def test_nobody_is_asked_for_tokens_where_no_text_is_wanted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    for kind in (SidecarAdministration, Administration):

        def noted(self: Any, *args: Any, real: Any = kind.listing, **options: Any) -> Any:
            asked.append(options["words"])
            return real(self, *args, **options)

        monkeypatch.setattr(kind, "listing", noted)
    for options in (("--no-text",), ("--blocks",), ()):
        place.ls(*options)
    assert asked == [False, False, True]


def test_without_the_models_file_there_is_no_text(place: Place) -> None:
    for damage in (lambda: place.vocabulary.write_bytes(b"GGUF"), place.vocabulary.unlink):
        damage()
        assert "TEXT" not in place.ls()
        assert place.texts() == ["", ""]


@pytest.mark.parametrize("place", ["files"], indirect=True)
def test_the_text_is_cut_to_the_terminal_and_the_first_to_go(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes what it is given for a terminal
    for width in (70, 79, 80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        heading, *lines, _ = place.ls().splitlines()
        assert ("TEXT" in heading) == (width >= 80)
        assert all("[31mblue?" in line for line in lines if "Why" in line and width == 200)
        assert any("How do birds" in line for line in lines) == (width >= 80)
        plain = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in (heading, *lines)]
        assert all("\x1b" not in line and len(line) <= width for line in plain)


@pytest.mark.parametrize("place", ["sidecar"], indirect=True)
def test_the_sidecar_gives_a_bounded_number_of_tokens_and_only_when_asked(place: Place) -> None:
    with SidecarAdministration(place.daemon.socket) as admin:
        silent = admin.listing(Selection())
        assert [(line.words, line.words_before) for line in silent.chains] == [(b"", 0)] * 2
        told = admin.listing(Selection(), words=True)
        most = 4 * (BEFORE_TOKENS + AFTER_TOKENS)
        assert all(0 < len(line.words) <= most for line in told.chains)
        assert max(line.tokens * 4 for line in told.chains) > most
        assert not any(line.words_before == 0 for line in told.chains)
