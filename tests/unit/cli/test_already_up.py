"""What a second `tiering up` says of the first: only what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ollama_tiering.cli.already_up import say_already
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.record import UpRecord
from ollama_tiering.launch.up import UpRequest

REQUEST = UpRequest(Address(port=5), Path("/s"))


def test_a_log_that_is_not_there_is_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.log").touch()
    record = UpRecord(pid=os.getpid(), url="u", socket="/s", ready=True)
    record.server_log, record.sidecar_log = (str(tmp_path / f"{n}.log") for n in ("server", "side"))
    say_already(REQUEST, record)
    out = capsys.readouterr().out
    assert f"  logs    {tmp_path / 'server.log'}\n" in out
    assert "side.log" not in out
    assert "  look    tiering status\n" in out
    say_already(REQUEST, UpRecord(pid=os.getpid(), url="u", socket="/other", ready=True))
    out = capsys.readouterr().out
    assert "  logs" not in out
    assert "  look    tiering status --socket /other\n" in out


def test_one_that_is_just_starting_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    say_already(REQUEST, None)
    assert capsys.readouterr().out == "already starting: another `tiering up` has port 5\n"
    say_already(REQUEST, UpRecord(pid=os.getpid(), url="u", socket="/s"))
    out = capsys.readouterr().out
    assert out.startswith(f"already starting: u (process {os.getpid()})\n")
    assert "look" not in out
