"""`tiering model` as a person sees it: one line on success, one line on a mistake."""

import json
from pathlib import Path

import pytest

from ollama_tiering.cli import main


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["model", *args])
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


TINY = ("--layers", "1", "--embd", "32", "--ffn", "32", "--seed", "3")


def test_make_writes_the_file_and_says_so_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("make", "qwen3-tiny", str(file), *TINY) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert f"{file.stat().st_size:,} bytes" in out
    assert file.read_bytes()[:4] == b"GGUF"


def test_make_replaces_a_file_only_when_forced(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("precious")
    assert run("make", "qwen3-tiny", str(file), *TINY) == 2
    assert file.read_text() == "precious"
    assert "--force" in capsys.readouterr().err
    assert run("make", "qwen3-tiny", str(file), *TINY, "--force") == 0
    assert file.read_bytes()[:4] == b"GGUF"


def test_dry_run_writes_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("make", "qwen3-tiny", str(file), "--dry-run") == 0
    assert "would write" in capsys.readouterr().out
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize(
    "args",
    [
        ("nope",),
        ("qwen3-tiny", "--kv-heads", "3"),
        ("qwen3-tiny", "--seed", "-1"),
        ("qwen3-tiny", "--dtype", "q8_0", "--ffn", "33"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_2(
    file: Path, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("make", args[0], str(file), *args[1:]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert not file.exists()


def test_a_missing_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("make", "qwen3-tiny", str(tmp_path / "no" / "m.gguf")) == 2
    assert "no is not a directory" in capsys.readouterr().err


def test_shapes_lists_the_same_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("shapes") == 0
    text = capsys.readouterr().out
    assert run("shapes", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"qwen3-tiny", "qwen3-0.6b", "llama-tiny"} <= {row["name"] for row in rows}
    assert all(row["name"] in text for row in rows)
