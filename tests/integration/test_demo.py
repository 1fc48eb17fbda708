"""`tiering demo` as a person runs it: it proves its point and leaves nothing behind."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ollama_tiering.patchset import build
from ollama_tiering.patchset.binary import ENV_BINARY, named_binary

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


def demo(tmp_path: Path, *options: str, **variables: str) -> "subprocess.Popen[str]":
    own = {n: v for n, v in os.environ.items() if not n.startswith("OLLAMA_")}
    env = own | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)} | variables
    command = [sys.executable, "-m", "ollama_tiering", "demo", *options]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def left_behind(tmp_path: Path) -> list[str]:
    """Directories and processes of a demonstration."""
    mine = [
        f"{p.info['pid']} {p.info['cmdline']}"
        for p in psutil.process_iter(["pid", "cmdline"])
        if any(str(tmp_path) in part for part in p.info["cmdline"] or [])
    ]
    return [str(p) for p in tmp_path.glob("tiering-demo-*")] + mine


def check(outcome: dict, engine: str) -> None:
    assert engine in outcome["engine"]
    assert outcome["failures"] == []
    rows = {row["row"]: row for row in outcome["rows"]}
    assert rows["cold"]["recomputed_tokens"] == 1500
    assert rows["cold"]["times_sooner"] == 1
    assert rows["cold"]["same_logprobs"] or not outcome["one_answer"]
    restarted = rows["restored after restart of both"]
    sooner = rows["cold"]["seconds_to_first_token"] / restarted["seconds_to_first_token"]
    assert restarted["times_sooner"] == pytest.approx(sooner, rel=0.01)
    saved = rows["cold"]["seconds_to_first_token"] - restarted["seconds_to_first_token"]
    assert restarted["saved_seconds"] == pytest.approx(saved, abs=1e-5)
    assert rows["in-memory hit"]["memory_tokens"] == 1499
    for label in ("restored after unload", "restored after restart of both"):
        assert rows[label]["restored_tokens"] == 1499
        assert rows[label]["same_tokens"]
        assert rows[label]["same_logprobs"]
        assert len(rows[label]["tokens"]) == 16


def test_the_reference_engine_restores_what_it_computed_bit_for_bit(tmp_path: Path) -> None:
    process = demo(tmp_path, "--engine", "reference", "--json")
    out, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    check(json.loads(out), "reference")
    assert left_behind(tmp_path) == []


@pytest.mark.engine
def test_ollama_restores_what_it_computed_bit_for_bit(tmp_path: Path) -> None:
    binary = named_binary() or next(iter(build.built_binaries()), None)
    if binary is None:
        pytest.skip(f"no patched Ollama is built: run `tiering patch`, or set {ENV_BINARY}")
    process = demo(tmp_path, "--engine", "ollama", "--json", **{ENV_BINARY: str(binary)})
    out, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    check(json.loads(out), "Ollama")
    assert json.loads(out)["one_answer"] == (platform.machine() == "x86_64")
    assert left_behind(tmp_path) == []


def test_an_engine_that_does_not_restore_is_found_out(tmp_path: Path) -> None:
    """A binary that is no patched Ollama: the demonstration fails, and says where to look."""
    fake = tmp_path / "ollama"
    source = (REPOSITORY / "tests" / "unit" / "launch" / "fake_ollama.py").read_text()
    fake.write_text(f"#!{sys.executable}\n{source}")
    fake.chmod(0o755)
    process = demo(tmp_path, **{ENV_BINARY: str(fake)})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 9
    assert "Ollama answered 501" in errors


def test_kept_files_are_named_and_there(tmp_path: Path) -> None:
    process = demo(tmp_path, "--engine", "reference", "--keep", "--quiet")
    out, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert "bit for bit" in out
    root, ram = (Path(p) for p in errors.strip().removeprefix("kept: ").split(" and "))
    try:
        assert (root / "model.gguf").exists()
        assert list((root / "blocks").rglob("*.kvb"))
    finally:
        shutil.rmtree(ram)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_one_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = demo(tmp_path, "--engine", "reference")
    assert process.stderr
    for line in process.stderr:
        if "asking with a prompt" in line:
            break
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    deadline = time.monotonic() + 10
    while left := left_behind(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
