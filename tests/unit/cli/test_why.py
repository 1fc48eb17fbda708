"""`tiering why` through a sidecar, over both wires: what made-up clients are known to do is found,
shown and cured, and nothing is said of prompts that are as they should be.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from ollama_tiering import cli
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.places import short_directory
from tests.sidecar import SidecarProcess
from tests.unit.models.marked_text import TOKENS, encode
from tests.unit.models.vocabularies import NORMAL, vocabulary_file
from tests.unit.sidecar.ollama_models import name_model
from tests.unit.sidecar.wires import RATE, GoWire, SocketWire, Wire
from tests.unit.why.clients import CASES, RULES, SOUND, STORY, Case, chatml, llama3

WIRES = {"gRPC": GoWire, "engine socket": SocketWire}
_numbers = itertools.count(1)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


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

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert isinstance(caught.value.code, int)
        return caught.value.code, *self._capsys.readouterr()

    def why(self, *options: str) -> str:
        code, out, err = self.run("why", self.model, *options)
        assert code == 0, err
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
        daemon.kill()  # writing down what nobody wants any more takes long


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


def test_what_was_stored_under_other_settings_is_named_with_them(
    running: SidecarProcess, asker: Asker
) -> None:
    prompt = encode(chatml(("system", f"Act as an expert software developer. {RULES}")))
    other = asker.kind(running, asker.file, other=True)
    other.store(prompt)
    other.close()
    asker.turn("Quite another thing. " * 9)
    assert asker.wire.ask([*prompt, 1]) == 0
    (found,) = asker.found()
    assert found["verdict"] == "other_settings"
    assert found["lost_tokens"] == len(prompt)
    assert found["client"] == "Aider"
    assert "fixed num_ctx" in found["cure"]
    setting, both = next(iter(found["settings"].items()))
    assert both[0] != both[1]
    if setting == "batch":
        assert both == ["1024", "512"]
    assert f"{setting}: {both[0]} → {both[1]}" in asker.why()


def test_what_was_evicted_or_damaged_is_no_change_of_the_prompt(asker: Asker) -> None:
    tokens = encode(RULES)
    asker.turn(RULES)
    asker.wire.ask(tokens, reason=pb.SHORTFALL_DAMAGED, unread=len(tokens) - 100)
    asker.wire.ask(tokens, reason=pb.SHORTFALL_BLOCKS_GONE, unread=len(tokens) - 100)
    evicted, damaged = asker.found()
    assert (evicted["verdict"], damaged["verdict"]) == ("evicted", "damaged")
    for one in (evicted, damaged):
        assert one["lost_tokens"] == one["computed_tokens"] >= len(tokens) - 101
    assert "verify --repair" in damaged["cure"]
    assert "local_budget" in evicted["cure"]


def test_partings_of_one_cause_are_told_once_and_what_cost_most_comes_first(asker: Asker) -> None:
    asker.turn(llama3(("system", "Current time is 20:37:19. You are HA, Home Assistant." + RULES)))
    for minute in range(3):
        clock = f"Current time is 20:38:0{minute}."
        asker.turn(llama3(("system", f"{clock} You are HA, Home Assistant.{RULES}")))
    asker.turn(CASES[0].stored)
    asker.turn(CASES[0].asked)
    lines = asker.why().splitlines()
    heads = [line for line in lines if line.startswith(asker.model)]
    assert [line.split(": ")[1] for line in heads] == [
        "computed again 3 times",
        "computed again once",
    ]
    costs = [sum(one["lost_seconds"] for one in group) for group in _groups(asker.found())]
    assert costs == sorted(costs, reverse=True)
    assert sum("GetDateTime" in line for line in lines) == 1
    assert lines[-1].startswith("since ")


def _groups(partings: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Those with the clock, then the others."""
    clock = [one for one in partings if one["client"] == "Home Assistant"]
    return [clock, [one for one in partings if one not in clock]]


def test_no_text_is_shown_where_nobody_wants_it(asker: Asker) -> None:
    asker.turn(CASES[0].stored)
    asker.turn(CASES[0].asked)
    shown = asker.why("--no-text") + asker.why("--no-text", "--json")
    assert "36ee5" not in shown
    assert "Claude Code, a" not in shown
    assert "an id that changes, in the system prompt" in shown
    (found,) = asker.found("--no-text")
    assert (found["prompt_text"], found["stored_text"]) == (None, None)


def test_only_so_many_and_only_of_that_model(asker: Asker) -> None:
    for _ in range(2):
        for text in (CASES[0].stored, CASES[0].asked.replace("0aaa9", f"0aa{next(_numbers):02}")):
            asker.turn(text)
    assert len(asker.found()) == 2
    (latest,) = asker.found("--last", "1")
    assert latest == asker.found()[0]
    code, out, _ = asker.run("why", "no-such-model", "--json")
    assert (code, json.loads(out)["partings"]) == (0, [])


def test_a_model_whose_vocabulary_is_not_found_is_told_of_without_text(asker: Asker) -> None:
    asker.turn(CASES[0].stored)
    asker.turn(CASES[0].asked)
    asker.file.rename(asker.file.with_name("away"))
    (found,) = asker.found()
    assert found["verdict"] == "no_text"
    assert found["lost_tokens"] > 64
    assert "vocabulary was not found" in asker.why()


def test_it_is_readable_at_80_columns(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        asker.turn(case.stored)
        asker.turn(case.asked)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    lines = [_ESCAPE.sub("", line) for line in asker.why().splitlines()]
    assert len(lines) > 40
    assert max(map(cell_len, lines)) <= 80
    whole = " ".join(" ".join(lines).split())
    for number in (0, 1, 6):
        assert CASES[number].shown[0] in whole
    labels = {line[2:8].strip() for line in lines if line.startswith("  ") and line.strip()}
    assert {"what", "where", "stored", "prompt", "cure", "source", ""} == labels


def test_cures_that_people_add_come_first(asker: Asker, running: SidecarProcess) -> None:
    own = running.root / ".config" / "ollama-tiering" / "recipes.toml"
    own.parent.mkdir(parents=True, exist_ok=True)
    asker.turn(CASES[0].stored)
    asker.turn(CASES[0].asked)
    own.write_text('[[recipe]]\ntext = "cch="\ncure = "Ask Ann."\nsource = "Ann"\n')
    try:
        assert [one["cure"] for one in asker.found()] == ["Ask Ann."]
        own.write_text('[[recipe]]\ncure = "Ask Ann."\n')
        code, _, err = asker.run("why", asker.model)
        assert code == 10
        assert f"{own}: recipe 1: source is missing" in err
    finally:
        own.unlink()


def test_status_says_in_one_line_what_a_day_costs(asker: Asker) -> None:
    for number in range(4):
        asker.turn(CASES[0].stored.replace("36ee5", f"36e{number}5"))
    asker.found()
    code, out, _ = asker.run("status")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("computed again in 24 h")]
    assert "tiering why" in line
    assert len(line) <= 80
    partings = json.loads(asker.run("status", "--json")[1])["partings"]
    assert partings["lost_seconds"] > 10
    assert partings["requests"] >= 1


def test_without_a_sidecar_it_says_so(
    asker: Asker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(tmp_path / "none"))
    code, out, err = asker.run("why")
    assert (code, out) == (9, "")
    assert "no sidecar runs" in err


class Discreet(SidecarProcess):
    """A rule says to show no text of diary."""

    def environment(self) -> dict[str, str]:
        found = super().environment()
        file = self.root / "config" / "ollama-tiering" / "config.toml"
        file.write_text(f'{file.read_text()}\n[models."diary"]\ntext = false\n')
        return {**found, "OLLAMA_MODELS": str(self.root / "models")}


def test_a_rule_keeps_the_text_of_a_model_from_everybody(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = asker.daemon.root / "models" / "manifests/registry.ollama.ai/library"
    with short_directory() as directory, Discreet(directory) as daemon:
        models = directory / "models"
        models.mkdir()
        (models / "manifests").symlink_to(diary.parents[1])
        (models / "blobs").symlink_to(asker.file.parent)
        name_model(models, "diary:latest", asker.file.name)
        try:
            monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(daemon.socket))
            wire = asker.kind(daemon, asker.file)
            for text in (CASES[0].stored, CASES[0].asked):
                wire.ask(encode(text))
                wire.store(encode(text))
            wire.close()
            with SidecarAdministration(daemon.socket) as admin:
                (message,) = admin.partings()
                assert message.before == message.asked == message.stored == b""
                assert message.lost_tokens > 64
                assert not any(line.words for line in admin.listing(words=True).chains)
            asker.model = "diary"
            (found,) = asker.found()
            assert (found["verdict"], found["prompt_text"]) == ("no_text", None)
            assert "a rule in config.toml forbids to show text of this model" in asker.why()
        finally:
            (diary / "diary" / "latest").unlink()


def test_what_was_evicted_is_named_with_the_budget_as_the_cure(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        short_directory() as directory,
        SidecarProcess(directory, ram_gb=0.002, local_gb=0) as daemon,
    ):
        monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(daemon.socket))
        wire = asker.kind(daemon, asker.file)
        prompt = encode(RULES)
        wire.store(prompt)
        for number in range(24):
            wire.store(encode(f"{number} is quite another prompt. {STORY * 8}"))
        assert wire.ask([*prompt, 1]) < len(prompt) - 64
        wire.close()
        (found,) = asker.found()
        assert found["verdict"] == "evicted"
        assert 64 <= found["lost_tokens"] <= len(prompt)
        assert "local_budget" in found["cure"]
        assert time.time() - 60 < found["evicted_unix_seconds"] < time.time()
        assert "it was stored, and was evicted" in asker.why()
