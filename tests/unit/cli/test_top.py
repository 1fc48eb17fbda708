"""What `tiering top` shows: each request that ended once, what it saved, and why not more."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ollama_tiering.cli.top_state import MOST_REQUESTS, Watched
from ollama_tiering.cli.top_view import picture
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.places import short_directory
from tests.sidecar import SidecarProcess
from tests.unit.cli.test_invalid_settings import run

NAMES = {"sha256-1": "qwen3:8b"}


def runner(requests: int, *, pid: int = 1, restored: int = 900, **more: object) -> pb.RunnerReport:
    last = pb.LastRequest(
        prompt_tokens=1000,
        memory_tokens=50,
        restored_tokens=restored,
        shortfall=pb.SHORTFALL_DIFFERS,
        at_token=950,
    )
    said = {"model": "sha256-1", "tiered": True, "started_unix_seconds": 5.0, **more}
    return pb.RunnerReport(pid=pid, requests=requests, last_request=last, **said)  # type: ignore[arg-type]


def answer(*runners: pb.RunnerReport, **more: object) -> adm.StatResponse:
    tiers = [
        adm.TierStat(tier=1, budget_bytes=1 << 30, used_bytes=1 << 28, blocks=7),  # type: ignore[arg-type]
        adm.TierStat(tier=2, budget_bytes=1 << 34, used_bytes=0, disk_full=True),  # type: ignore[arg-type]
    ]
    return adm.StatResponse(version="9", tiers=tiers, runners=runners, **more)  # type: ignore[arg-type]


def shown(watched: Watched, said: adm.StatResponse | None, rows: int = 30, width: int = 130) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=rows)
    console.print(picture(said, watched, NAMES, rows))
    return out.getvalue()


def test_each_request_that_ends_is_shown_once() -> None:
    watched = Watched()
    watched.take(answer(runner(3)), 100.0, NAMES)
    assert list(watched.requests) == [], "it ended before anybody looked"
    watched.take(answer(runner(4)), 101.0, NAMES)
    watched.take(answer(runner(4)), 102.0, NAMES)
    (request,) = watched.requests
    assert (request.model, request.unseen, request.unix_seconds) == ("qwen3:8b", 0, 101.0)
    tokens = request.memory_tokens, request.restored_tokens, request.computed_tokens
    assert (request.prompt_tokens, *tokens) == (1000, 50, 900, 50)
    assert request.why == "prompt differs from the stored one at token 950"


def test_requests_between_two_looks_are_counted() -> None:
    watched = Watched()
    watched.take(answer(runner(3)), 100.0, NAMES)
    watched.take(answer(runner(7)), 101.0, NAMES)
    assert watched.requests[0].unseen == 3
    assert "(3 more before) prompt differs" in shown(watched, answer(runner(7)))


def test_a_runner_that_is_new_has_all_of_its_requests_shown() -> None:
    watched = Watched()
    watched.take(answer(), 100.0, NAMES)
    watched.take(answer(runner(1)), 101.0, NAMES)
    watched.take(answer(runner(1), runner(1, pid=2)), 102.0, NAMES)
    other = runner(1, started_unix_seconds=6.0)  # its process id is used again
    watched.take(answer(other, runner(1, pid=2)), 103.0, NAMES)
    assert [request.unix_seconds for request in watched.requests] == [103.0, 102.0, 101.0]


def test_a_runner_without_a_request_is_none() -> None:
    watched = Watched()
    watched.take(answer(), 100.0, NAMES)
    idle = pb.RunnerReport(pid=1, model="sha256-1", tiered=True)
    watched.take(answer(idle), 101.0, NAMES)
    assert not watched.requests
    assert "no request has ended" in shown(watched, answer(idle))


def test_what_was_saved_is_the_computing_less_the_restoring() -> None:
    took = pb.RestoreReport(
        tokens=900, lookup_seconds=0.1, fetch_seconds=0.2, copy_seconds=0.2, verify_seconds=9
    )
    other = pb.RestoreReport(tokens=3, fetch_seconds=7)
    cases = {
        8.5: runner(1, prefill_tokens_per_second=100.0, last_restore=took),
        9.0: runner(1, prefill_tokens_per_second=100.0, last_restore=other),
        None: runner(1, last_restore=took),
        0.0: runner(1, restored=0, prefill_tokens_per_second=100.0, last_restore=took),
    }
    for seconds, report in cases.items():
        watched = Watched()
        watched.take(answer(), 100.0, NAMES)
        watched.take(answer(report), 101.0, NAMES)
        assert watched.requests[0].seconds_saved == pytest.approx(seconds)


def test_flows_are_bytes_a_second() -> None:
    watched = Watched()
    watched.take(answer(get_bytes=10, put_bytes=10), 100.0, NAMES)
    assert (watched.flow.read, watched.flow.stored) == (0.0, 0.0)
    watched.take(answer(get_bytes=10 + (4 << 20), put_bytes=10), 102.0, NAMES)
    assert (watched.flow.read, watched.flow.stored) == (2 << 20, 0.0)
    assert "restoring 2.0 MiB/s" in shown(watched, answer())
    watched.take(answer(get_bytes=0, put_bytes=0), 103.0, NAMES)  # the sidecar was started again
    assert (watched.flow.read, watched.flow.stored) == (0.0, 0.0)


def test_no_more_than_some_are_kept_and_as_many_shown_as_fit() -> None:
    watched = Watched()
    watched.take(answer(runner(0)), 100.0, NAMES)
    for number in range(1, 2 * MOST_REQUESTS):
        watched.take(answer(runner(number)), 100.0 + number, NAMES)
    assert len(watched.requests) == MOST_REQUESTS
    for rows in (10, 24, 60):
        lines = shown(watched, answer(runner(1)), rows=rows).splitlines()
        assert len(lines) <= rows
        assert sum("qwen3:8b" in line for line in lines) >= rows - 8


@pytest.mark.parametrize("width", [80, 120])
def test_a_picture_says_tiers_models_and_what_is_wrong(width: int) -> None:
    watched = Watched()
    refused = pb.RunnerReport(pid=3, model="sha256-2", reason="a sliding window")
    said = answer(
        runner(1, to_store=2, prefill_tokens_per_second=1234.0),
        refused,
        queued_demotions=3,
        queued_bytes=5 << 20,
        partings=adm.PartingsSum(requests=3, lost_tokens=9000, lost_seconds=70.0),
    )
    watched.take(answer(), 100.0, NAMES)
    watched.take(said, 101.0, NAMES)
    text = shown(watched, said, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    for part in (
        "256.0 MiB of 1.0 GiB",
        "7 blocks",
        "the disk is too full",
        "qwen3:8b: 1 request, computes 1,234 tokens/s, 2 conversations to store",
        "not tiered: a sliding window",
        "5.0 MiB are to be written to the disk",
        "tiering why",
        "900",
    ):
        assert part in text


def test_a_sidecar_that_is_away_is_said() -> None:
    assert "does not answer" in shown(Watched(), None)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SidecarProcess]:
    with short_directory() as fast, SidecarProcess(tmp_path, fast=fast) as running:
        yield running


def test_one_picture_of_a_running_sidecar(
    daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in (("--once",), ()):  # here is no terminal
        code, out, _ = run(capsys, "top", "--socket", str(daemon.socket), *args)
        assert code == 0
        assert "no model is loaded" in out
        assert "ram" in out


def test_without_a_sidecar_it_is_9(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "top", "--socket", str(tmp_path / "none"))
    assert code == 9
    assert "no sidecar runs" in err


def test_on_a_terminal_it_goes_on_until_ctrl_c_also_without_the_sidecar(
    daemon: SidecarProcess,
) -> None:
    shown_there, terminal = pty.openpty()
    command = [sys.executable, "-m", "ollama_tiering", "top", "--seconds", "0.2"]
    process = subprocess.Popen(
        [*command, "--socket", str(daemon.socket)],
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(terminal)
    try:
        said = read_until(shown_there, b"no model is loaded")
        daemon.stop()
        said = read_until(shown_there, b"does not answer")
        process.send_signal(signal.SIGINT)
        read_until(shown_there, b"\x1b[?1049l")  # the screen of before is back
        assert process.wait(20) == 0, said
    finally:
        process.kill()
        process.wait()
        os.close(shown_there)


def read_until(terminal: int, wanted: bytes, seconds: float = 40.0) -> bytes:
    said, end = b"", time.monotonic() + seconds
    while wanted not in said:
        assert time.monotonic() < end, said[-2000:]
        said += os.read(terminal, 1 << 16)
    return said
