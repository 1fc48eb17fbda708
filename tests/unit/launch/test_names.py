"""Names of models from every models directory that this user's servers have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ollama_tiering.cli.model_names import of_models
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.names import all_names, first_names, models_dirs, shown
from ollama_tiering.launch.running_up import RunningUp, hold
from tests.unit.sidecar.ollama_models import blob, name_model


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)


def test_the_directory_of_a_tiering_up_is_known_while_it_runs_and_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_model(tmp_path / "own", "mine:1b", blob(1))
    name_model(tmp_path / "default", "theirs:1b", blob(1))
    name_model(tmp_path / "default", "other:1b", blob(2))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "default"))
    assert first_names(models_dirs()) == {blob(1): "theirs:1b", blob(2): "other:1b"}
    both = {blob(1): "mine:1b", blob(2): "other:1b"}
    with hold(Address(port=1)) as held:
        held.write(RunningUp(pid=os.getpid(), url="u", models=str(tmp_path / "own")))
        assert first_names(models_dirs()) == both
    assert first_names(models_dirs()) == both
    first = models_dirs(tmp_path / "default")
    assert first == [tmp_path / "default", tmp_path / "own"]
    assert first_names(first) == {blob(1): "theirs:1b", blob(2): "other:1b"}


def test_every_name_of_a_model_is_known(tmp_path: Path) -> None:
    for name in ("a:1", "b:1"):
        name_model(tmp_path, name, blob(1))
    assert all_names([tmp_path]) == {blob(1): ("a:1", "b:1")}
    assert all_names([tmp_path / "missing"]) == {}


def test_what_has_no_name_is_shown_by_its_digest_or_file() -> None:
    names = {blob(1): "a:1"}
    assert shown(blob(1), names) == shown(f"/models/blobs/{blob(1)}", names) == "a:1"
    assert shown("sha256-" + "ab" * 32, names) == "abababababab"
    assert shown("my.gguf", names) == "my.gguf"


def test_a_few_models_are_named_in_a_sentence() -> None:
    said = [of_models("abcde"[:count]) for count in range(6)]
    assert said == [
        *("", " of a", " of a and b", " of a, b and c"),
        *(" of a, b, c and 1 more model", " of a, b, c and 2 more models"),
    ]
