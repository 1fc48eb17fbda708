"""Which program `tiering up` starts while the settings cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.cli.up import _built_binary, _chosen
from ollama_tiering.errors import ConfigError, UnsupportedUpstream, UsageError
from ollama_tiering.patchset import binary
from ollama_tiering.patchset.llama_server import built, installation
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.report import Report
from tests.unit.patchset import fake_installed as fake

TYPO = ConfigError("config.toml: line 3", hint="correct it")


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(installation, "_UNITS", ())
    monkeypatch.setattr(installation, "_PREFIXES", ())
    monkeypatch.setattr(built, "trees", list)
    monkeypatch.setattr(binary, "built_binaries", list)
    return fake.installed(tmp_path / "installed")


def add_tree(folder: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = LinkTree(folder, str(program), "v0.32.15", "b10488", [], "ours")
    monkeypatch.setattr(built, "trees", lambda: [tree])


def test_what_was_patched_comes_before_a_build_of_the_go_engine(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="line 3"):
        _built_binary(None, TYPO)
    monkeypatch.setattr(binary, "built_binaries", lambda: [Path("/built")])
    assert _built_binary(None, TYPO) == (Path("/built"), False)
    program = ollama / "bin/ollama"
    assert _built_binary(str(ollama), TYPO) == (program, True)
    add_tree(tmp_path, program, monkeypatch)
    assert _built_binary(None, TYPO) == (program, True)
    monkeypatch.setenv("OLLAMA_TIERING_BINARY", "/bin/sh")
    assert _built_binary(None, TYPO) == (Path("/bin/sh"), False)


def test_a_program_that_is_gone_is_not_started(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tree(tmp_path, tmp_path / "gone/bin/ollama", monkeypatch)
    with pytest.raises(UnsupportedUpstream, match="is gone or not whole"):
        _built_binary(None, TYPO)


def test_an_installed_one_that_was_never_patched_serves_where_there_is_nothing_else(
    ollama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{ollama}/bin:/usr/bin:/bin")
    assert _built_binary(None, TYPO) == (ollama / "bin/ollama", True)


def test_a_failure_of_the_choice_itself_does_not_cost_the_server(
    ollama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[LinkTree]:
        raise PermissionError(13, "Permission denied", "/locked")

    monkeypatch.setattr(built, "trees", fail)
    with pytest.raises(PermissionError):
        _chosen(None, {}, Report(quiet=True))  # nothing is installed
    monkeypatch.setenv("PATH", f"{ollama}/bin:/usr/bin:/bin")
    assert _chosen(None, {}, Report(quiet=True)) == fake.at(ollama)
    assert "PermissionError" in capsys.readouterr().err
    with pytest.raises(UsageError):
        _chosen("/nowhere", {}, Report(quiet=True))
