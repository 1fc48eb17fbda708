"""Which program `tiering up` starts where something is wrong: settings that cannot be read, a
choice or a build that fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering import config
from ollama_tiering.cli import demo
from ollama_tiering.cli.up import _chosen
from ollama_tiering.config.salvage import asked
from ollama_tiering.errors import (
    BuildError,
    ConfigError,
    MissingTool,
    TieringError,
    UnsupportedUpstream,
    UsageError,
)
from ollama_tiering.launch import served
from ollama_tiering.launch.served import build_or_installed, ready_made
from ollama_tiering.patchset import finished
from ollama_tiering.patchset.llama_server import built, installation
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.report import Report
from tests.unit.patchset import fake_installed as fake

TYPO = ConfigError("config.toml: line 3", hint="correct it")
QUIET = Report(quiet=True)


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("OLLAMA_TIERING_BINARY", "OLLAMA_TIERING_CONFIG", "OLLAMA_TIERING_SOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(installation, "_UNITS", ())
    monkeypatch.setattr(installation, "_PREFIXES", ())
    monkeypatch.setattr(built, "trees", list)
    return fake.installed(tmp_path / "installed")


def add_tree(folder: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = LinkTree(folder, str(program), "v0.32.15", "b10488", [], "ours")
    monkeypatch.setattr(built, "trees", lambda: [tree])


def add_build(kind: str, place: Path | None = None) -> Path:
    """A finished one, the newest."""
    with finished.filling(finished.root() / kind / "0", finished.PROGRAM, "0" * 16) as fresh:
        fake.script(fresh / finished.PROGRAM, "")
        if place:
            record = {"format": 1, "place": str(place), "root": str(place)}
            (fresh / "gpu.json").write_text(json.dumps(record))
    return finished.root() / kind / "0" / finished.PROGRAM


def write_settings(text: str | bytes) -> None:
    file = config.config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def ready(ollama: str | None = None, **flags: str) -> Path:
    return ready_made(ollama, flags, TYPO).binary


def test_what_was_patched_comes_before_a_build_of_the_go_engine(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="line 3"):
        ready()
    newest = add_build(f"{config.DEFAULT_TAG}-native")
    assert ready() == newest
    assert ready_made(None, {}, TYPO).why_stock == "config.toml: line 3 (correct it)"
    program = ollama / "bin/ollama"
    assert ready(str(ollama)) == program
    add_tree(tmp_path, program, monkeypatch)
    assert ready() == program
    monkeypatch.setenv("OLLAMA_TIERING_BINARY", "/bin/sh")
    assert ready() == Path("/bin/sh")


def test_a_program_that_is_gone_is_not_started(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tree(tmp_path, tmp_path / "gone/bin/ollama", monkeypatch)
    with pytest.raises(UnsupportedUpstream, match="is gone or not whole"):
        ready()


def test_an_installed_one_that_was_never_patched_serves_where_there_is_nothing_else(
    ollama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{ollama}/bin:/usr/bin:/bin")
    assert ready() == ollama / "bin/ollama"


@pytest.mark.parametrize(
    ("flags", "settings", "kind"),
    [
        ({"tag": "v0.16.3"}, "", "v0.16.3-native"),
        ({"tag": "0.17.1"}, "", "v0.17.1-native"),
        ({"tag": "v0.20.0"}, "", None),  # not there
        ({"cpu": "variants"}, "", "v0.16.3-variants"),
        ({"cpu": "variants", "tag": "v0.17.1"}, "", None),
        ({"cuda": "on"}, "", "v0.16.3-native-cuda12"),
        ({"cuda": "off", "tag": "v0.16.3"}, "", "v0.16.3-native"),
        ({"cuda": "stock"}, "", "v0.16.3-native-cudastock"),
        ({"cuda": "stock=/nowhere"}, "", None),
        ({"source": "/elsewhere"}, "", "v0.16.3-native"),
        ({}, '[patch]\ntag = "v0.17.1"\n', "v0.17.1-native"),
        ({}, '[patch]\ncpu = "variants"\n', "v0.16.3-variants"),
        ({}, '[patch]\ncuda = "stock"\n', "v0.16.3-native-cudastock"),
        ({"tag": "v0.17.1"}, '[patch]\ntag = "v0.20.0"\n', "v0.17.1-native"),
    ],
)
@pytest.mark.parametrize("typo", ["[sidecar]\nram_budget = 8GiB\n", "[sidecar]\nsome = 1\n"])
def test_a_typo_does_not_change_what_is_served(
    ollama: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, str],
    settings: str,
    kind: str | None,
    typo: str,
) -> None:
    """An installed one is there, too, and the newest build is of a version nobody asked for."""
    monkeypatch.setenv("PATH", f"{ollama}/bin:/usr/bin:/bin")
    kinds = ("native-cudastock", "native-cuda12", "variants", "native")
    others = ("v0.17.1-native", "v0.24.0-native", "v0.16.3-rc1-native")
    for name in (*(f"v0.16.3-{one}" for one in kinds), *others):
        add_build(name, ollama)
    write_settings(typo + settings)
    if kind is None:
        with pytest.raises(ConfigError, match="line 3"):
            ready(**flags)
    else:
        assert ready(**flags) == finished.root() / kind / "0/ollama"


def test_with_an_option_for_the_go_engine_no_installed_one_takes_its_place(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{ollama}/bin:/usr/bin:/bin")
    add_tree(tmp_path, ollama / "bin/ollama", monkeypatch)
    for name, value in {"tag": "v0.16.3", "cpu": "native", "cuda": "off", "source": "x"}.items():
        with pytest.raises(ConfigError, match="line 3"):
            ready(**{name: value})
    with pytest.raises(UsageError, match="--tag is for versions with the Go engine"):
        ready(str(ollama), tag="v0.16.3")


UNKNOWN = {"tag", "cpu", "cuda", "source"}


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("", set()),
        ("[server]\ncpu_attention = stock\n", set()),  # has the name of another one in it
        ("[sidecar]\nlocal_dir = /data/cuda-cache\n", set()),
        ("[sidecar]\nram_budget = 8GiB\n[patch]\ncpu = 'variants'\n", set()),
        ("[patch]\ntag = v0.17.1\n", UNKNOWN),  # no quotes
        ("[patch]\ntag = 17\n", {"tag"}),
        ("[patch]\ncpu = 'varaints'\n", {"cpu"}),
        ("[patch]\ntga = 'v0.17.1'\n", UNKNOWN),
        ("[ptach]\ntag = 'v0.17.1'\n", UNKNOWN),
        ("[sidecar]\ntag = 'v0.17.1'\n", {"tag"}),
        ("[patch\ntag = 'v0.17.1'\n", UNKNOWN),
        ("[sidecar\nx = 1\n", UNKNOWN),
        ("tag = 'v0.17.1'\n", UNKNOWN),
        ("patch = 1\n", UNKNOWN),
        ('[sidecar]\nx = """\n[patch]\ntag = \'v0.17.1\'\n', UNKNOWN),
        ("[patch]\ntag = 'v0.17.1'\ntag = 'v0.16.3'\n", UNKNOWN),
        (b"[sidecar]\nx = '\xff'\n", set()),
        (b"[patch]\ntag = 'v0.16.3\xff'\n", set()),  # a version that nobody has built
    ],
)
def test_what_nobody_can_know_is_named(ollama: Path, text: str | bytes, unknown: set[str]) -> None:
    write_settings(text)
    assert asked({}).unknown == unknown
    if "tag" in unknown:
        add_build("v0.16.3-native")
        with pytest.raises(ConfigError, match="line 3"):
            ready()


def test_a_file_that_cannot_be_opened_says_nothing(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.config_file().mkdir(parents=True)
    assert asked({}).unknown == UNKNOWN
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(tmp_path / "nothing"))
    assert asked({"patch.tag": "v0.16.3"}).unknown == UNKNOWN - {"tag"}
    with pytest.raises(ConfigError, match="flag --cuda"):
        asked({"patch.cuda": "perhaps"})


def no_build(error: Exception) -> Callable[..., Path]:
    def fail(*_: Any, **__: Any) -> Path:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        BuildError("go failed with exit code 1; log: /l\n  x.c:1: error: no", hint="read the log"),
        MissingTool("C compiler: gcc not found", hint="install one"),
        OSError(28, "No space left on device"),
    ],
)
def test_an_installed_one_serves_as_stock_where_nothing_can_be_built(
    ollama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(served, "patched_binary", no_build(error))
    with pytest.raises(type(error)):
        build_or_installed({}, QUIET)  # nothing is installed
    monkeypatch.setenv("PATH", f"{ollama}/bin:/usr/bin:/bin")
    found = build_or_installed({"cpu": "native"}, QUIET)
    assert (found.binary, found.installed) == (ollama / "bin/ollama", fake.at(ollama))
    assert found.stands_in
    assert "\n" not in found.why_stock
    cause = error.hint if isinstance(error, TieringError) else "No space left"
    assert str(cause) in found.why_stock
    with pytest.raises(type(error)):  # it is not that version
        build_or_installed({"tag": "v0.16.3"}, QUIET)
    assert build_or_installed({"tag": fake.VERSION}, QUIET).binary == found.binary


def test_a_wrong_option_is_no_failure_of_a_build(
    ollama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{ollama}/bin:/usr/bin:/bin")
    for error in (UsageError("x"), ConfigError("x"), KeyboardInterrupt()):
        monkeypatch.setattr(served, "patched_binary", no_build(error))  # type: ignore[arg-type]
        with pytest.raises(type(error)):
            build_or_installed({"cuda": "stock=/nowhere"}, QUIET)
    for error in (UsageError("of no option"), RuntimeError("a bug")):
        monkeypatch.setattr(served, "patched_binary", no_build(error))  # type: ignore[arg-type]
        assert build_or_installed({}, QUIET).binary == ollama / "bin/ollama"


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


def test_demo_builds_what_its_options_name(ollama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def build(_: Report, **given: Any) -> Path:
        seen.update(given)
        return ollama / "bin/ollama"

    monkeypatch.setattr("ollama_tiering.patchset.binary.own_build", build)
    choice = demo._choose("ollama", "0.17.1", "variants", quiet=True)
    assert choice.binary == ollama / "bin/ollama"
    assert seen == {"tag": "v0.17.1", "cpu": "variants"}
    option = next(one for one in demo.demo.params if one.name == "cpu")
    assert option.opts == ["--cpu"]
