"""The page shows what the commands print, from a real sidecar, and changes what they change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering import cli
from ollama_tiering.cli.web_data import SidecarData
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.errors import ServiceError, TieringError, UsageError
from ollama_tiering.store.values import Listing
from tests.places import short_directory
from tests.unit.web.stage import DANGEROUS, MODELS, Stage

CONVERSATIONS = 5


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with short_directory() as root, Stage(root, days=30) as made:
        made.converse(CONVERSATIONS)
        made.part()
        made.sidecar.wait_written()
        yield made


@pytest.fixture
def data(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> SidecarData:
    return data_of(stage, monkeypatch)


def data_of(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> SidecarData:
    for name in [name for name in os.environ if name.startswith(("OLLAMA", "XDG_"))]:
        monkeypatch.delenv(name)
    for name, value in stage.environment().items():
        monkeypatch.setenv(name, value)
    return SidecarData(stage.sidecar.socket, text=True)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    with pytest.raises(SystemExit):
        cli.main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def without(document: Any, *keys: str) -> Any:
    """Without what changes from one question to the next."""
    if isinstance(document, dict):
        return {key: without(one, *keys) for key, one in document.items() if key not in keys}
    return [without(one, *keys) for one in document] if isinstance(document, list) else document


def first(data: SidecarData) -> dict[str, Any]:
    chains = data.conversations()["chains"]
    found: dict[str, Any] = next(chain for chain in chains if DANGEROUS in chain["text"])
    return found


def test_what_status_prints(data: SidecarData, capsys: pytest.CaptureFixture[str]) -> None:
    changing = ("used_bytes", "read_bytes_per_second", "write_bytes_per_second", "open_leases")
    said = without(data.live()["status"], *changing)
    assert said == without(printed(capsys, "status"), *changing)
    assert {use["name"] for use in said["model_uses"]} == {"qwen3:8b"}


def test_what_ls_prints(data: SidecarData, capsys: pytest.CaptureFixture[str]) -> None:
    shown = data.conversations()
    summary = shown.pop("summary")
    assert shown == printed(capsys, "ls")
    assert len(shown["chains"]) >= CONVERSATIONS
    some = data.conversations(2)
    assert (some["chains"], some["summary"]) == (shown["chains"][:2], summary)
    assert summary.startswith(f"{len(shown['chains'])} conversations, ")


def test_what_report_prints(data: SidecarData, capsys: pytest.CaptureFixture[str]) -> None:
    shown, rows = data.report(7), printed(capsys, "report", "--days", "7")
    assert len(shown["calendar"]) == 7
    assert set(shown["days"]) == set(shown["calendar"])
    assert set(shown["models"]) == {"qwen3:8b", "llama3.1:8b"}
    for name in ("requests", "restored_tokens", "saved_seconds"):
        whole = sum(row[name] for row in rows)
        assert shown["all"][name] == pytest.approx(whole)
        assert sum(sums[name] for sums in shown["days"].values()) == pytest.approx(whole)
        assert sum(sums[name] for sums in shown["models"].values()) == pytest.approx(whole)


def test_what_doctor_and_config_print(
    data: SidecarData, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [check["name"] for check in printed(capsys, "doctor")]
    shown = data.doctor()
    assert [check["name"] for check in shown["checks"]] == names
    assert shown["status"][0].startswith("sidecar ")
    settings = data.config()
    assert without(settings, "shown", "error") == printed(capsys, "config")
    assert settings["shown"].keys() == settings["settings"].keys()
    assert settings["error"] is None


def test_what_why_prints(data: SidecarData, capsys: pytest.CaptureFixture[str]) -> None:
    shown = data.why()
    with pytest.raises(SystemExit):
        cli.main(["why"])
    text = capsys.readouterr().out
    assert len(shown["causes"]) == 2
    for cause in shown["causes"]:
        assert cause["headline"] in text
        assert all(words in text for _, words in cause["rows"])
        assert {"stored", "prompt", "cure"} <= {label for label, _ in cause["rows"]}
    assert shown["last_line"] in text


def test_no_text_shows_nothing_of_a_prompt(
    data: SidecarData, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = SidecarData(stage.sidecar.socket, text=False)
    asked = []

    def listing(self: SidecarAdministration, *, words: bool) -> Listing:
        asked.append(words)
        return whole(self, words=words)

    whole = SidecarAdministration.listing
    monkeypatch.setattr(SidecarAdministration, "listing", listing)
    assert not any("text" in chain for chain in private.conversations()["chains"])
    labels = {label for cause in private.why()["causes"] for label, _ in cause["rows"]}
    assert "what" in labels
    assert not labels & {"stored", "prompt"}
    assert "text" in data.conversations()["chains"][0]
    assert asked == [False, True]  # and no tokens of it are asked for


def test_a_rule_keeps_the_text_of_its_model_from_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = f'[models."{MODELS[0].partition(":")[0]}"]\ntext = false\n'
    with short_directory() as root, Stage(root, rules=rule) as made:
        made.converse(4)
        made.part()
        data = data_of(made, monkeypatch)
        texts = {(chain["model"], bool(chain["text"])) for chain in data.conversations()["chains"]}
        assert (MODELS[0], True) not in texts
        assert (MODELS[1], True) in texts
        rows = [row for cause in data.why()["causes"] for row in cause["rows"]]
        assert "a rule in config.toml forbids to show text of this model" in dict(rows).values()
        assert not {label for label, _ in rows} & {"stored", "prompt"}


def test_requests_that_end_are_noted_between_two_looks(data: SidecarData, stage: Stage) -> None:
    data.live()
    stage.ask("<|im_start|>user\nwhat is new?<|im_end|>\n" * 9)
    (request,) = data.live()["requests"]
    assert request["model"] == "qwen3:8b"
    parts = ("memory_tokens", "restored_tokens", "computed_tokens")
    assert sum(request[part] for part in parts) == request["prompt_tokens"] > 0
    assert len(data.live()["requests"]) == 1


def test_pinned_it_stays_until_it_is_unpinned_and_removed(data: SidecarData) -> None:
    chain = first(data)
    assert "pinned: " in data.pin(chain["id"], unpin=False)["sentence"]
    assert first(data)["pinned"]
    with pytest.raises(TieringError, match="is pinned; nothing was removed"):
        data.remove(chain["id"], dry_run=False)
    data.pin(chain["id"], unpin=True)
    before = len(data.conversations()["chains"])
    assert data.remove(chain["id"], dry_run=True)["sentence"].startswith("would remove 1 conv")
    assert len(data.conversations()["chains"]) == before
    assert data.remove(chain["id"], dry_run=False)["sentence"].startswith("removed 1 conversation")
    assert len(data.conversations()["chains"]) == before - 1
    with pytest.raises(UsageError):
        data.remove(chain["id"], dry_run=True)


def test_without_a_sidecar_the_cure_is_said(tmp_path: Path) -> None:
    data = SidecarData(tmp_path / "none", text=True)
    for ask in (data.live, data.conversations, data.why, lambda: data.report(3)):
        with pytest.raises(ServiceError) as caught:
            ask()
        assert "tiering up" in (caught.value.hint or "")
    with pytest.raises(ServiceError):
        data.remove("ab" * 32, dry_run=False)
    assert "no sidecar" in data.doctor()["status"][0]
    assert data.config()["settings"]
