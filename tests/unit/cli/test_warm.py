"""`tiering warm` on the command line: which words it takes, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.warm import at_start
from ollama_tiering.warm.prompt import of_parts
from tests.unit.cli.test_invalid_settings import run


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("m",), "there is no prompt to compute"),
        ((), "there is no prompt to compute"),
        (("m", "-", "--system", "-"), "standard input can be one of the files only"),
        (("m", "-", "--request", "-"), "standard input can be one of the files only"),
        (("m", "{file}", "--request", "{file}"), "--request is the whole prompt"),
        (("", "--request", "{file}"), "this is no JSON"),
        (("m", "{file}", "-o", "num_ctx"), "is no NAME=VALUE"),
        (("m", "{binary}"), "cannot be read"),
        (("--forget", "nobody"), "no prompt is kept as 'nobody'"),
        (("--forget", "../x"), "is no name for a prompt"),
        (("m", "{file}", "--at-start", "../x"), "is no name for a prompt"),
        (("m", "{file}.none"), "does not exist"),
    ],
)
def test_words_that_make_no_sense_are_one_line_and_2(
    args: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("words")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    names = {"file": tmp_path / "text", "binary": tmp_path / "binary"}
    code, out, err = run(capsys, "warm", *(arg.format(**names) for arg in args))
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert at_start.names() == []


def test_what_is_kept_is_listed_and_forgotten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    at_start.keep("home", of_parts("qwen3", system="x"))
    at_start.keep("bad", of_parts("qwen3", system="x"))
    (at_start.directory() / "bad.json").write_text("{")
    code, out, _ = run(capsys, "warm", "--list")
    bad, home = out.splitlines()
    assert (code, home) == (0, "home  qwen3")
    assert bad.startswith("bad  ")
    assert "cannot be read" in bad
    assert run(capsys, "warm", "--forget", "bad")[0] == 0
    assert at_start.names() == ["home"]


def test_without_a_sidecar_it_is_9(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("words")
    args = ("warm", "m", str(tmp_path / "text"), "--socket", str(tmp_path / "none"))
    code, _, err = run(capsys, *args, "--at-start", "kept")
    assert code == 9
    assert "no sidecar runs" in err
    assert at_start.names() == ["kept"], "it is computed at the next start"
