from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import click
import pytest

from ollama_tiering import __version__, cli, extras
from ollama_tiering.errors import StoreDamaged

HEAVY = (
    "grpc",
    "git",
    "numpy",
    "rich",
    "gguf",
    "httpx",
    "google.protobuf",
)


def invoke(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def add_command(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    @click.command()
    def explode() -> None:
        raise failure

    module = types.ModuleType("explode_module")
    module.__dict__["explode"] = explode
    monkeypatch.setitem(sys.modules, "explode_module", module)
    monkeypatch.setitem(cli.COMMANDS, "explode", ("explode_module:explode", "x"))
    monkeypatch.setattr(cli, "_exists", lambda target: True)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("--version") == 0
    assert __version__ in capsys.readouterr().out
    for flag in ("-h", "--help"):
        assert invoke(flag) == 0
        assert "fetch" in capsys.readouterr().out


@pytest.mark.parametrize("args", [("--version",), ("-h",), ("fetch", "-h"), ("patch", "-h")])
def test_a_start_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from ollama_tiering.cli import main\n"
        "try:\n"
        f"    main({list(args)!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not cli._exists(cli.COMMANDS[name][0]):
        assert invoke(name) == 2
        return
    assert invoke(name, "-h") == 0
    assert "Usage: tiering" in capsys.readouterr().out


def test_an_expected_failure_is_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(monkeypatch, StoreDamaged("block ab12 in /x: bad checksum", hint="run verify"))
    assert invoke("explode") == 8
    assert capsys.readouterr().err == "error: block ab12 in /x: bad checksum\nhint: run verify\n"


def test_a_bug_is_short_and_its_traceback_is_for_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(monkeypatch, ZeroDivisionError("oops"))
    assert invoke("explode") == 1
    short = capsys.readouterr().err
    assert "unexpected ZeroDivisionError at test_main.py:" in short
    assert "Traceback" not in short
    assert invoke("--debug", "explode") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)]
)
def test_interrupt_and_broken_pipe(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    failure: BaseException,
    code: int,
) -> None:
    monkeypatch.setattr(cli.own_process, "silence_stdout", lambda: None)
    add_command(monkeypatch, failure)
    assert invoke("explode") == code


def test_bad_usage_is_2_and_points_to_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("no-such-command") == 2
    assert "hint: tiering -h" in capsys.readouterr().err
    assert invoke("fetch", "--no-such-flag") == 2
    assert "hint: tiering fetch -h" in capsys.readouterr().err
    assert invoke() == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("stauts",), "no such command 'stauts'; did you mean 'status'?\n"),
        (("patch", "chekc"), "Did you mean 'check'?\n"),
        (("up", "--hots", "x"), "Did you mean '--host'?\n"),
        (("qqqq",), "no such command 'qqqq'\n"),
    ],
)
def test_a_mistyped_name_is_guessed(
    args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(*args) == 2
    assert capsys.readouterr().err.splitlines(keepends=True)[0].endswith(said)


def test_a_package_of_an_extra_that_is_missing_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_command(monkeypatch, ModuleNotFoundError("no", name="nvidia.cuda_nvrtc"))
    monkeypatch.setattr(extras, "installer", lambda: None)
    assert invoke("explode") == 6
    said = capsys.readouterr().err
    assert said.startswith("error: a kernel on a GPU (its compiler, NVRTC) needs nvidia.cuda_nvrtc")
    assert "install 'nvidia-cuda-nvrtc-cu12>=12.9,<13'\n" in said
    add_command(monkeypatch, ModuleNotFoundError("no module named x", name="x"))
    assert invoke("explode") == 1
    assert "unexpected ModuleNotFoundError" in capsys.readouterr().err


def test_a_command_whose_module_is_missing_is_not_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "later", ("ollama_tiering.cli.later_on:later", "x"))
    assert invoke("-h") == 0
    assert "later" not in capsys.readouterr().out


def test_every_command_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/cli.md").read_text()
    for name, (target, _) in cli.COMMANDS.items():
        if cli._exists(target):
            assert f"`tiering {name}" in page, f"docs/cli.md says nothing of `tiering {name}`"
