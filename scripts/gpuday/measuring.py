"""Steps of a day with a GPU that measure csrc's kernels: by `tiering kernel report`, by the suite
for a GPU, and under compute-sanitizer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.gpuday import bounds
from scripts.gpuday.steps import DONE, FAILED, LACKING, Bound, Outcome

ROOT = Path(__file__).resolve().parents[2]
PINNED = "pinned_bytes_per_s"

Line = dict[str, Any]


def report(out: Path, cases: Iterable[str] = ()) -> tuple[list[Line], str]:
    """The lines of `tiering kernel report`, and what it said last if there are none."""
    out.unlink(missing_ok=True)
    named = [word for case in cases for word in ("--case", case)]
    command = [sys.executable, "-m", "ollama_tiering", "kernel", "report", "--out", str(out)]
    done = _run([*command, *named])
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    return lines, _last(done)


def rates(out: Path) -> Outcome:
    """What the bus and the memory give: what other figures are compared with."""
    lines, last = report(out, ["rates"])
    outcome = of_report(lines, last)
    for line in lines:
        if PINNED in line:
            outcome.figures[PINNED] = line[PINNED]
    return outcome


def kernels(out: Path) -> Outcome:
    lines, last = report(out)
    outcome = of_report(lines, last)
    outcome.bounds = worst(lines)
    return outcome


def of_report(lines: Sequence[Line], last: str) -> Outcome:
    """Failed if a line is not ok; lacking where there was no GPU or no compiler to begin with."""
    from ollama_tiering.kernels import gpu_report

    table = ["```text", *(gpu_report.text(line) for line in lines), "```"] if lines else []
    wrong = [str(line["case"]) for line in lines if not line["ok"]]
    if not lines:
        return Outcome(LACKING, why=last, cure="NVRTC: a wheel nvidia-cuda-nvrtc, or the toolkit")
    if lines[0].get("status") == "NO_DEVICE":
        return Outcome(LACKING, table, why=str(lines[0]["failed"]))
    why = f"failed, or outside its bound: {'; '.join(wrong)}" if wrong else ""
    return Outcome(FAILED if wrong else DONE, table, why=why)


def worst(lines: Sequence[Line]) -> list[Bound]:
    """Of the report's ratios, the worst of each kind; none of a kind that no case measured."""
    ratios = [ratio for line in lines for ratio in line.get("ratios", ())]
    kinds = (
        (bounds.VRAM, "VRAM decode", "rate / read"),
        (bounds.COLD, "cold decode", "rate / pinned copy"),
        (bounds.STEP_TIME, "cold decode", "time / max(copy, compute)"),
    )
    found = []
    for bound, begin, end in kinds:
        values = [
            ratio["value"]
            for ratio in ratios
            if ratio["name"].startswith(begin)
            and ratio["name"].endswith(end)
            and "tensor cores" not in ratio["name"]  # those are not the launcher's choice
        ]
        if values:
            found.append(bound.of(min(values) if bound.at_least else max(values)))
    return found


def suite() -> Outcome:
    """tests/gpu, without its bandwidths, which `kernels` has."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    # plugins of that Python may warn, which is not ours to fail for
    done = _run([*command, "-W", "default", "-k", "not bandwidth", "tests/gpu"])
    last = _last(done)
    if "No module named pytest" in done.stdout:
        return Outcome(LACKING, why="no pytest in this Python", cure="install pytest")
    if done.returncode == 0 and "passed" in last:
        return Outcome(DONE, [f"`{last}`"])
    if done.returncode in (0, 5):  # all were skipped, which is no result
        return Outcome(LACKING, [f"`{last}`"], why="no test of the suite ran")
    return Outcome(FAILED, ["```text", done.stdout[-3000:], "```"], why=last)


def sanitizer(tools: Iterable[str]) -> Outcome:
    """One small case under memcheck."""
    from ollama_tiering.kernels import gpu_case

    if "compute-sanitizer" not in tools:
        return Outcome(LACKING, why="no compute-sanitizer here", cure="it comes with the toolkit")
    case = [sys.executable, "-m", "ollama_tiering.kernels.gpu_case", gpu_case.FIRST]
    checked = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *case]
    done = _run(checked, {"TIERING_CUDA_LINEINFO": "1"})
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    if done.returncode == 0 and summary and " 0 errors" in summary[-1]:
        return Outcome(DONE, [f"`{summary[-1].strip()}`"])
    return Outcome(FAILED, ["```text", done.stdout[-3000:], "```"], why=_last(done))


def _run(
    command: Sequence[str], more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (more or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print("+", *command, f"\n{done.stdout}", flush=True)
    return done


def _last(done: subprocess.CompletedProcess[str]) -> str:
    """The last thing that was said which is not a cure."""
    said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    said = [line for line in said if not line.startswith("hint:")]
    return said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"
