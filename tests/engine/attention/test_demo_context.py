"""`tiering demo --context` as a person runs it, on a GPU that is not there
(tests/attention/fakegpu).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ollama_tiering.launch import server_log
from ollama_tiering.patchset.binary import ENV_BINARY
from ollama_tiering.patchset.finished import source_of
from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import devices

REPOSITORY = Path(__file__).parents[3]
MIB = 1 << 20


def demo(
    binary: Path, tmp_path: Path, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    own = {n: v for n, v in os.environ.items() if not n.startswith(("OLLAMA_", "FAKEGPU_"))}
    env = own | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY), ENV_BINARY: str(binary)}
    command = [sys.executable, "-m", "ollama_tiering", "demo", "--context", *options]
    return subprocess.run(
        command, env=env | variables, capture_output=True, text=True, check=False, timeout=250
    )


def left_behind(tmp_path: Path) -> list[str]:
    mine = [
        f"{p.info['pid']} {p.info['cmdline']}"
        for p in psutil.process_iter(["pid", "cmdline"])
        if any(str(tmp_path) in part for part in p.info["cmdline"] or [])
    ]
    return [str(p) for p in tmp_path.glob("tiering-demo-*")] + mine


def test_stock_gives_layers_up_and_paging_none_with_one_answer(
    paged_binary: Path, tmp_path: Path
) -> None:
    """On a card that is larger than the demonstration may use. What it prints is what the servers
    said.
    """
    done = demo(paged_binary, tmp_path, "--json", "--keep", **devices(2048))
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    assert shown["failures"] == []
    assert shown["gpu"]["description"] == "Fake GPU"
    assert shown["gpu"]["total_bytes"] == 2048 * MIB
    fits, divided, ours = shown["runs"]
    assert (fits["num_ctx"], divided["num_ctx"], ours["num_ctx"]) == (4096, 32768, 32768)
    assert fits["layers_on_gpu"] == ours["layers_on_gpu"] == ours["layers"] == 9
    assert divided["layers_on_gpu"] < 9
    assert divided["kv_cpu_bytes"] > 0 == ours["kv_cpu_bytes"]
    assert divided["pinned_bytes"] == 0 < ours["pinned_bytes"]
    for run in (divided, ours):
        kv_bytes = run["kv_vram_bytes"] + run["pinned_bytes"] + run["kv_cpu_bytes"]
        assert kv_bytes == 512 * MIB
        assert run["vram_bytes"] <= 480 * MIB
    for run in shown["runs"]:  # of this device even stock's divided plan: all compute as one CPU
        assert run["same_tokens"]
        assert run["same_logprobs"]
        assert len(run["tokens"]) == 16
        assert run["tokens_per_second"] > 0

    root, ram = (Path(p) for p in done.stderr.rpartition("kept: ")[2].strip().split(" and "))
    try:
        log = (root / "ollama-untiered.log").read_text(encoding="utf-8")
    finally:
        shutil.rmtree(ram)
    assert log.count('msg="inference compute"') == 3
    last = server_log.load_plan(log)
    assert last
    assert last.pinned_bytes == ours["pinned_bytes"]
    assert last.kv_vram_bytes == ours["kv_vram_bytes"]
    assert "paged attention: K/V of some layers go to pinned memory" in log


def test_without_a_device_it_says_so_in_one_line(paged_binary: Path, tmp_path: Path) -> None:
    done = demo(paged_binary, tmp_path, "--quiet", CUDA_VISIBLE_DEVICES="none", **devices(2048))
    assert done.returncode == 6, done.stderr
    assert done.stdout == ""
    assert "error: Ollama finds no NVIDIA GPU on this machine" in done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr  # and its cure


def test_without_what_pages_nothing_is_started(gpu_binary: Path, tmp_path: Path) -> None:
    done = demo(gpu_binary, tmp_path, **devices(2048))
    assert done.returncode == 6
    assert "there is no libggml-cuda-tiering.so beside" in done.stderr
    assert left_behind(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_shim_that_gives_another_answer_is_found_out(
    gpu_binary: Path, binary: Path, tmp_path: Path
) -> None:
    """Copies come before their batch's rows are written, and the rows are not written again."""
    change = "attention.cpp", "part_of(graph, both, 2)", "part_of(graph, both, 1)"
    wrong = paged.install(gpu_binary, source_of(binary), tmp_path / "wrong", change)
    done = demo(wrong, tmp_path, "--quiet", **devices(2048, **paged.COMPUTING_LATE))
    if done.returncode != 9:  # NaN can end a request
        assert done.returncode == 1, done.stderr
        assert "the paged answer differs from that with all K/V on the GPU" in done.stderr
