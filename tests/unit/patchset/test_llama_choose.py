"""Which Ollama a command means, and `tiering patch` for the installed one as a person meets it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering import cli
from ollama_tiering.errors import ResultDiffers, UnsupportedUpstream, UsageError
from ollama_tiering.launch import after_update, llama_up
from ollama_tiering.patchset.llama_server import choose, installation
from ollama_tiering.patchset.llama_server.choose import chosen
from tests.unit.patchset import fake_installed as fake

Tiering = Callable[..., tuple[int, str, str]]
NO_OPTIONS: dict[str, str | None] = {"tag": None, "cpu": None}


class World:
    """An installed Ollama on PATH, a source, and a compiler."""

    def __init__(self, root: Path) -> None:
        self.place = fake.installed(root / "installed")
        self.installation = fake.at(self.place)
        self.source = fake.llama_source(root / "llama.cpp")
        fake.compiler(root / "compiler")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    fake.only_here(monkeypatch)
    monkeypatch.setenv("PATH", f"{made.place}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", str(tmp_path / "compiler/c++"))
    return made


@pytest.fixture
def tiering(world: World, capsys: pytest.CaptureFixture[str]) -> Tiering:
    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(args)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert isinstance(caught.value.code, int)
        return caught.value.code, said.out, said.err

    return run


def test_nothing_is_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(None, NO_OPTIONS) == world.installation
    monkeypatch.setattr(choose, "built_binaries", lambda: [Path("/built")])
    assert chosen(None, NO_OPTIONS) is None  # what was built before goes on being used


def test_an_option_or_a_setting_decides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("auto", NO_OPTIONS) == world.installation
    assert chosen(str(world.place), NO_OPTIONS) == world.installation
    assert chosen(None, {"tag": "v0.16.3"}) is None
    with pytest.raises(UsageError, match="--cuda-arch is for versions with the Go engine"):
        chosen("auto", {"cuda_arch": "8.6"})
    monkeypatch.setenv("OLLAMA_TIERING_BINARY", "/bin/sh")
    assert chosen(None, NO_OPTIONS) is None
    monkeypatch.delenv("OLLAMA_TIERING_BINARY")
    settings = world.place / "config.toml"
    settings.write_text('[patch]\ntag = "v0.17.0"\n')
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(settings))
    assert chosen(None, NO_OPTIONS) is None


def test_what_was_patched_before_is_meant_again(
    world: World, tiering: Tiering, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--ollama", str(world.place), "--llama-source", str(world.source))
    code, out, err = tiering("patch", *given)
    assert code == 0, err
    binary = Path(out.splitlines()[-1])
    assert binary.is_file()
    monkeypatch.setattr(choose, "built_binaries", lambda: [Path("/built")])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert chosen(None, NO_OPTIONS) == world.installation
    assert tiering("patch")[1:] == (f"{binary}\n", f"{binary} is up to date\n")
    world.installation.server.unlink()  # as in the middle of an update
    for gone in (world.installation.program, None):
        with pytest.raises(UnsupportedUpstream, match="is gone or not whole") as caught:
            chosen(None, NO_OPTIONS)
        assert f"{world.installation.program}, which was patched" in caught.value.message
        assert "revert --ollama auto" in (caught.value.hint or "")
        if gone:
            gone.unlink()
    assert chosen(None, {"tag": "v0.16.3"}) is None
    assert tiering("patch")[0] == 4
    assert tiering("patch", "revert", "--ollama", "auto")[0] == 0
    assert chosen(None, NO_OPTIONS) is None


def test_one_that_is_not_whole_stops_what_would_build_another_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.installation.server.unlink()
    with pytest.raises(UnsupportedUpstream, match="it is not whole"):
        chosen(None, NO_OPTIONS)
    with pytest.raises(UnsupportedUpstream, match="it is not whole"):
        chosen("auto", NO_OPTIONS)
    program = world.installation.program
    fake.script(program, "#!/bin/sh\nexit 1\n")  # half of the program
    with pytest.raises(UnsupportedUpstream, match="it is not whole"):
        chosen(None, NO_OPTIONS)
    monkeypatch.setattr(installation, "PROGRAM_MAGIC", b"other")  # a script that is for another
    assert chosen(None, NO_OPTIONS) is None
    for older in ("0.29.9", "0.16.3", "0.0.0"):
        fake.script(program, f"#!/bin/sh\necho 'ollama version is {older}'\n")
        assert chosen(None, NO_OPTIONS) is None
        with pytest.raises(UnsupportedUpstream, match=r"is older than v0\.30"):
            chosen("auto", NO_OPTIONS)
    fake.script(program, "#!/bin/sh\necho 'client version is 0.30.0-rc1'\n")
    with pytest.raises(UnsupportedUpstream, match="it is not whole"):
        chosen(None, NO_OPTIONS)
    monkeypatch.setattr(choose, "built_binaries", lambda: [Path("/built")])
    assert chosen(None, NO_OPTIONS) is None  # nobody meant the installed one


def test_status_and_revert(world: World, tiering: Tiering) -> None:
    assert "nothing to do" in tiering("patch", "revert", "--ollama", "auto")[2]
    binary = tiering("patch", "--llama-source", str(world.source))[1].strip()
    text = tiering("patch", "status")[1]
    assert (
        f"{world.installation.program}: patched v0.32.15 (llama-server of llama.cpp b10488)" in text
    )
    (world.installation.lib / "libllama.so").write_text("updated")
    (row,) = json.loads(tiering("patch", "status", "--json")[1])["installed"]
    assert (row["state"], row["binary"]) == ("changed since", binary)
    folder = Path(binary).parents[1]
    dry = tiering("patch", "revert", "--ollama", str(world.place), "--dry-run")[1]
    assert dry == f"would remove {folder}\n"
    assert folder.is_dir()
    assert tiering("patch", "revert", "--ollama", "auto")[1] == f"removed {folder}\n"
    assert not folder.exists()
    assert world.installation.program.is_file()
    code, _, err = tiering("patch", "revert", "--ollama", "auto", "--tag", "v0.16.3")
    assert (code, "alone" in err) == (2, True)


def test_what_fails_has_an_exit_code_and_a_way_out(
    world: World, tiering: Tiering, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--llama-source", str(world.source))
    said = world.installation.server.read_text()
    fake.script(world.installation.program, "#!/bin/sh\necho 'ollama version is 0.40.0'\n")
    fake.script(world.installation.server, "#!/bin/sh\necho 'version: 1 (unknown)'\n")
    code, _, err = tiering("patch")
    assert code == 4
    assert "which llama.cpp is in Ollama v0.40.0 is not known here" in err
    assert "or build a version with the Go engine" in err
    fake.script(world.installation.program, "#!/bin/sh\necho 'ollama version is 0.32.15'\n")
    fake.script(world.installation.server, said)
    code, _, err = tiering("patch", "--ollama", "auto", "--allow-untested")
    assert (code, "for versions with the Go engine" in err) == (2, True)

    def fail(*_: object) -> None:
        raise ResultDiffers("self-test: devices differ")

    monkeypatch.setattr(llama_up, "self_test", fail)
    assert tiering("patch", *where)[0] == 1
    assert "no build tree yet" in tiering("patch", "status")[1]
    assert tiering("patch", "--ollama", "auto", "--tag", "v0.16.3")[0] == 2


def test_with_wait_each_end_is_one_line_and_a_code(
    world: World, tiering: Tiering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_update, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(after_update, "_LOOK_SECONDS", 0.01)
    wait = ("patch", "--wait", "--ollama", str(world.place), "--llama-source", str(world.source))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    code, _, err = tiering(*wait)
    *_, line = err.splitlines()
    assert code == 6
    assert line.startswith("error: ")
    assert "install" in line  # the cure
    monkeypatch.setenv("CXX", str(tmp_path / "compiler/c++"))
    code, out, err = tiering(*wait)
    assert code == 0, err
    assert err.splitlines()[-1] == f"the next start of Ollama {fake.VERSION} is tiered"
    assert tiering(*wait, "-q") == (0, out, f"{out.strip()} is up to date\n")
    assert tiering("patch", "--wait", "--tag", "v0.16.3")[0] == 2


def test_it_becomes_a_service(world: World, tiering: Tiering) -> None:
    code, _, err = tiering("systemd", "install", "--user", "--dry-run")
    assert (code, "no patched Ollama is built yet" in err) == (2, True)
    assert tiering("patch", "--llama-source", str(world.source))[0] == 0
    code, out, err = tiering("systemd", "install", "--user", "--dry-run")
    assert code == 0, err
    assert "tree/lib/ollama/libllama-server-impl.so" in out
