"""`tiering report`: sums of days and models, in text, in JSON and as a page."""

from __future__ import annotations

import datetime
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ollama_tiering.cli.report import lines
from ollama_tiering.cli.report_days import OTHERS, of_models, reported
from ollama_tiering.cli.report_page import page
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from tests.places import short_directory
from tests.sidecar import SidecarProcess
from tests.unit.cli.test_invalid_settings import run
from tests.unit.sidecar.reports import report

TODAY = datetime.date.today()
BEFORE = str(TODAY - datetime.timedelta(1))


def day(
    date: str,
    name: str,
    memory: int,
    restored: int,
    computed: int,
    saved: float,
    parted: int = 0,
    written: int = 0,
) -> adm.DayOfModel:
    return adm.DayOfModel(
        date=date,
        model=f"sha256-{name}" if name else "",
        name=name,
        requests=2,
        prompt_tokens=memory + restored + computed,
        memory_tokens=memory,
        restored_tokens=restored,
        recomputed_tokens=computed,
        saved_seconds=saved,
        partings=parted,
        written_bytes=written,
    )


DAYS = [
    day(BEFORE, "qwen3:8b", 600, 300, 100, 250.0, 3, 2 << 20),
    day(str(TODAY), "qwen3:8b", 0, 0, 1000, 0.0, 1, 1 << 20),
    day(str(TODAY), "<llama>", 0, 900, 100, 400.0),
    day(str(TODAY), "", 0, 0, 10, 0.0),
]


def test_a_line_for_each_day_for_all_and_for_each_model_what_saved_most_first() -> None:
    said = list(lines(reported(DAYS), 30))
    assert [line.split()[0] for line in said] == [
        *("day", BEFORE, str(TODAY), "all", "<llama>", "qwen3:8b", "other"),
    ]
    assert said[1].split() == [
        *(BEFORE, "2", "1,000", "60", "%", "30", "%", "10", "%", "4", "min", "10", "s"),
        *("3", "2.0", "MiB"),
    ]
    assert "10 min 50 s" in said[3]
    assert said[6].startswith(OTHERS)
    assert said[6].split()[-3:] == ["-", "-", "-"]  # nothing was restored, parted or written
    assert said[3].split()[-3:] == ["4", "3.0", "MiB"]


def test_only_models_with_this_in_their_names_count() -> None:
    assert set(of_models(reported(DAYS, "LLAMA"))) == {"<llama>"}
    assert list(lines(reported(DAYS, "gemma"), 7)) == ["no request has ended in the last 7 days"]


def test_the_page_is_whole_and_takes_nothing_from_elsewhere() -> None:
    text = page(reported(DAYS), 30)
    assert not re.search(r"<script|https?://|@import|url\(", text)
    assert "<llama>" not in text
    assert "&lt;llama&gt;" in text
    assert "30 days: 10 min 50 s saved" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    bars = re.findall(r'<rect class="(\w+)" x="([\d.]+)".*? height="([\d.]+)"', text)
    assert {name for name, _, _ in bars} == {"memory", "restored", "computed", "saved"}
    heights = [float(height) for name, x, height in bars if name != "saved" and x == bars[-1][1]]
    assert sum(heights) == pytest.approx(160, abs=0.2)  # today asked for most
    assert page([], 1).count("<svg") == 2  # nothing at all is drawn, too


def test_a_day_that_has_begun_where_the_sidecar_runs_has_its_place() -> None:
    tomorrow = str(TODAY + datetime.timedelta(1))
    text = page(reported([*DAYS, day(tomorrow, "qwen3:8b", 0, 5, 5, 1.0)]), 7)
    assert f"<title>{tomorrow}, memory 0</title>" in text
    assert f">{tomorrow}</text>" in text


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SidecarProcess]:
    with short_directory() as fast, SidecarProcess(tmp_path, fast=fast) as running:
        yield running


def test_what_a_sidecar_has_counted(
    daemon: SidecarProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("report", "--socket", str(daemon.socket))
    code, out, _ = run(capsys, *words)
    assert (code, out) == (0, "no request has ended in the last 30 days\n")
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        rpc.BlockStoreStub(channel).ReportRunner(report(3, restored=640), timeout=5)
    code, out, _ = run(capsys, *words, "--json", "--days", "1")
    assert code == 0
    [one] = json.loads(out)
    assert (one["requests"], one["restored_tokens"]) == (3, 640)
    code, out, _ = run(capsys, *words, "--html", str(tmp_path / "page.html"))
    assert (code, out) == (0, f"wrote {tmp_path / 'page.html'}\n")
    assert "30 days" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_without_a_sidecar_it_is_9(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "report", "--socket", str(tmp_path / "none"))
    assert code == 9
    assert "no sidecar runs" in err
