"""Steps of a day with a GPU that measure csrc's kernels: by `tiering kernel report`, by the suite
for a GPU, and under compute-sanitizer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ollama_tiering.kernels import gpu_case, gpu_report, library_path, nvrtc
from ollama_tiering.patchset.run import Finished, run
from scripts.gpuday.steps import DONE, FAILED, LACKING, ROOT, Day, Outcome

PINNED = "pinned_bytes_per_s"
_RATIOS: tuple[tuple[str, str, str, Callable[[list[float]], float]], ...] = (
    ("vram", "VRAM decode", "rate / read", min),
    ("cold", "cold decode", "rate / pinned copy", min),
    ("step", "cold decode", "time / max(copy, compute)", max),
)

Line = dict[str, Any]


def csrc(day: Day) -> Outcome:
    """The library of csrc, and NVRTC, which compiles its kernels when they are used. MissingTool if
    there is no compiler.
    """
    if day.stand_in:
        why = "no GPU: what stands in has no driver, and no kernel runs on it"
        return Outcome(LACKING, why=why)
    version = ".".join(map(str, nvrtc.compiler().version))
    return Outcome(DONE, [f"`{library_path()}`; NVRTC {version}"])


def rates(day: Day) -> Outcome:
    """What the bus and the memory give: what other figures are compared with."""
    lines, last = _report(day.out / "rates.jsonl", "--case", "rates")
    outcome = of_report(lines, last)
    outcome.figures = {PINNED: next((line[PINNED] for line in lines if PINNED in line), None)}
    return outcome


def kernels(day: Day) -> Outcome:
    lines, last = _report(day.out / "kernels.jsonl")
    outcome = of_report(lines, last)
    outcome.bounds = worst(lines)
    return outcome


def _report(out: Path, *words: str) -> tuple[list[Line], str]:
    """The lines of `tiering kernel report`, and what it said last if there are none."""
    out.unlink(missing_ok=True)
    command = (sys.executable, "-m", "ollama_tiering", "kernel", "report", "--out", str(out))
    done = _run(*command, *words)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    return lines, last_line(done)


def of_report(lines: Sequence[Line], last: str) -> Outcome:
    """Failed if a line is not ok, lacking where there is none."""
    if not lines:
        return Outcome(LACKING, why=last)
    table = ["```text", *map(gpu_report.text, lines), "```"]
    wrong = "; ".join(str(line["case"]) for line in lines if not line["ok"])
    why = f"failed, or outside its bound: {wrong}" if wrong else ""
    return Outcome(FAILED if wrong else DONE, table, why=why)


def worst(lines: Sequence[Line]) -> dict[str, float | None]:
    """Of the report's ratios, the worst of each kind; none of a kind that no case measured."""
    # tensor cores are not the launcher's choice
    ratios = [r for one in lines for r in one.get("ratios", ()) if "tensor cores" not in r["name"]]
    found: dict[str, float | None] = {}
    for bound, begin, end, worst_of in _RATIOS:
        named = [r for r in ratios if r["name"].startswith(begin) and r["name"].endswith(end)]
        if named:
            found[bound] = worst_of([ratio["value"] for ratio in named])
    return found


def suite(_day: Day) -> Outcome:
    """tests/attention/gpu, without its bandwidths, which `kernels` has."""
    # plugins of that Python may warn, which is not ours to fail for
    words = ("-q", "-p", "no:cacheprovider", "-m", "gpu", "-W", "default", "-k", "not bandwidth")
    done = _run(sys.executable, "-m", "pytest", *words, "tests/attention/gpu")
    last = last_line(done)
    if done.returncode == 0 and "passed" in last:
        return Outcome(DONE, [f"`{last}`"])
    if done.returncode in (0, 5):  # all were skipped, which is no result
        return Outcome(LACKING, [f"`{last}`"], why="no test of the suite ran")
    return Outcome(FAILED, ["```text", *done.tail[-40:], "```"], why=last)


def sanitizer(_day: Day) -> Outcome:
    """One small case under memcheck. MissingTool where the toolkit has no sanitizer."""
    command = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    case = (sys.executable, "-m", gpu_report.MODULE, gpu_case.FIRST)
    done = _run(*command, *case, TIERING_CUDA_LINEINFO="1")
    summary = [line.strip() for line in done.tail if "ERROR SUMMARY" in line]
    if done.returncode == 0 and summary and " 0 errors" in summary[-1]:
        return Outcome(DONE, [f"`{summary[-1]}`"])
    return Outcome(FAILED, ["```text", *done.tail[-40:], "```"], why=last_line(done))


def _run(*command: str, **env: str) -> Finished:
    """What it says goes into the step's log, too."""
    done = run(*command, cwd=ROOT, env=env)
    print(*done.tail, sep="\n", flush=True)
    return done


def last_line(done: Finished) -> str:
    """The last thing that was said which is not a cure."""
    said = [line.strip() for line in done.tail if line.strip() and not line.startswith("hint:")]
    return said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"
