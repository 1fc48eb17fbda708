"""Errors of the operating system come with cause, place and cure."""

from __future__ import annotations

import errno
import os
import pwd
import sys
from pathlib import Path

import click
import pytest

from ollama_tiering import cli, config
from ollama_tiering.config import places
from ollama_tiering.doctor import system_errors
from ollama_tiering.doctor.check import Check, guarded
from ollama_tiering.errors import ConfigError
from ollama_tiering.kernels import library
from ollama_tiering.launch import process
from ollama_tiering.launch.block_service import BlockService
from ollama_tiering.system.directories import UnsafeDirectory, secure_directory
from ollama_tiering.system.durable_file import replace_file
from tests.unit.cli.test_main import add_command, invoke

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full(*_args: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_path_is_named_with_what_to_do_about_it() -> None:
    for number, cure in ((errno.EACCES, "owner"), (errno.EROFS, "read-only"), (errno.ENOENT, "")):
        said, hint = system_errors.cause_and_cure(OSError(number, os.strerror(number), "/x/y"))
        assert said == f"/x/y: {os.strerror(number)}"
        assert cure in hint
    both = OSError(errno.EXDEV, os.strerror(errno.EXDEV), "/x/y", None, "/z")
    assert system_errors.cause_and_cure(both)[0].startswith("/x/y to /z: ")


def test_a_full_disk_that_the_system_does_not_name_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(system_errors, "is_full", lambda place: place == config.state_dir())
    add_command(monkeypatch, FULL)
    assert invoke("explode") == 1
    assert capsys.readouterr().err == (
        f"error: No space left on device at {config.state_dir()}\nhint: free some space there\n"
    )
    monkeypatch.setattr(system_errors, "is_full", lambda place: False)
    assert invoke("explode") == 1
    assert "none of the usual places is full" in capsys.readouterr().err


def test_without_a_path_the_line_of_ours_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(monkeypatch, OSError(errno.EIO, os.strerror(errno.EIO)))
    assert invoke("explode") == 1
    assert "error: Input/output error (in test_main.py:" in capsys.readouterr().err


def test_output_that_nobody_takes_is_said_to_be_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        encoding, errors = "utf-8", "strict"
        write = flush = staticmethod(full)

    silenced = []
    monkeypatch.setattr(system_errors.own_process, "silence_stdout", lambda: silenced.append(1))
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space") as caught:
        click.echo("a line")
    said, _ = system_errors.cause_and_cure(caught.value)
    assert said == "standard output: No space left on device"
    assert silenced


def test_a_file_that_is_open_is_named_when_its_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        replace_file(tmp_path / "durable", "text")
    assert caught.value.filename == str(tmp_path / "durable")


def test_a_process_that_could_not_even_write_its_log_names_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "logs/sidecar.log"
    service = BlockService(tmp_path / "s.sock", log)
    service.child = process.start("the sidecar", "/bin/false", log=log)
    service.child._process.wait()
    assert service.why_not(OSError()) == f"it ended with exit code 1: (nothing in {log})"
    monkeypatch.setattr(process, "is_full", lambda place: place == log)
    assert service.why_not(OSError()).endswith(
        f"(nothing in {log}; its disk is full: free some space there)"
    )
    assert str(log) in process.died(service.child).message


@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_a_link_for_a_directory_is_called_a_link(tmp_path: Path, target: str) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(UnsafeDirectory) as caught:
        secure_directory(tmp_path / "link")
    assert caught.value.message == f"{tmp_path / 'link'} is a link"
    assert str(tmp_path / target) in (caught.value.hint or "")


def test_a_directory_that_cannot_be_made_is_named_with_what_is_in_its_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsafeDirectory, match=f"{tmp_path}/file/a/?b?: Not a directory"):
        secure_directory(tmp_path / "file/a/b")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME whom the system does not know, as in many containers."""

    def unknown(_uid: int) -> None:
        raise KeyError

    library.load.cache_clear()  # else an earlier test has found it
    for name in [n for n in os.environ if n.startswith(("XDG_", "OLLAMA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(
    "args",
    [
        *(("status",), ("ls",), ("config",), ("up",), ("demo",), ("patch", "status"), ("fetch",)),
        *(("sidecar",), ("logs",), ("systemd", "status", "--user"), ("verify",), ("gc",)),
        *(("rm", "--yes", "abc"), ("kernel", "check"), ("llama-server",), ("bench", "gate")),
    ],
)
def test_no_home_is_one_line_with_a_cure(
    homeless: None, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(*args) == ConfigError.exit_code
    error, hint = capsys.readouterr().err.splitlines()
    assert error == (
        f"error: no home directory: HOME is not set, and the system knows no user {os.getuid()}"
    )
    assert hint == "hint: set HOME to a directory of that user: HOME=/DIRECTORY tiering ..."


def test_doctor_without_a_home_says_so(homeless: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("doctor") == 1
    assert "no home directory: HOME is not set" in capsys.readouterr().out


def test_what_needs_no_home_works_without_one(
    homeless: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind in ("STATE", "DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    assert invoke("ls") == 0
    assert invoke("gc", "--dry-run") == 0


def test_a_home_of_nobody_is_an_invalid_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", "~no-such-user/cache")
    with pytest.raises(ConfigError, match=r"~no-such-user/cache: this machine has no user no-such"):
        places.cache_dir()


def test_a_home_is_asked_for_in_one_place() -> None:
    """Whoever asks `~` of pathlib ends in a RuntimeError where there is no home."""
    package = Path(cli.__file__).parents[1]
    asking = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if ".expanduser()" in (text := file.read_text(encoding="utf-8")) or "Path.home()" in text
    ]
    # the last two catch it
    assert sorted(asking) == ["config/places.py", "config/settings.py", "sidecar/manifests.py"]


def test_a_check_that_cannot_be_made_has_place_and_cure() -> None:
    def look() -> list[Check]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/x/y")

    (check,) = guarded("storage", look)
    assert check.finding == "cannot be checked: /x/y: Permission denied"
    assert "owner" in check.cure
