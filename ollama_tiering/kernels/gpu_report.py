"""`tiering kernel report`: runs every case of gpu_case.py as a process, and prints a line when it
ends.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ollama_tiering import extras
from ollama_tiering.errors import MissingTool, UsageError, did_you_mean
from ollama_tiering.kernels import gpu_case, nvrtc

TIMEOUT_S: Final = 900.0  # the first use of an image compiles it
MODULE: Final = "ollama_tiering.kernels.gpu_case"

Line = dict[str, Any]


def chosen(names: Sequence[str], *, quick: bool) -> list[str]:
    """The cases to run, in order. UsageError for an unknown name."""
    every = [*gpu_case.exactness(), *gpu_case.bandwidths()]
    for name in names:
        if name not in every:
            raise UsageError(f"no case {name!r}{did_you_mean(name, every)}")
    if names:
        return list(names)
    return list(gpu_case.exactness()) if quick else every


def run(names: Sequence[str]) -> Iterator[Line]:
    """One line for each case. If the GPU itself cannot be used, there is only the line that says
    so.
    """
    try:
        nvrtc.compiler()
    except MissingTool:
        extras.need("cuda")  # a checkout installs it; elsewhere the error names the command
    machine = one(gpu_case.MACHINE)
    yield machine
    if not machine["ok"]:
        return
    for name in names:
        if name != gpu_case.MACHINE:
            yield one(name)


def one(name: str, timeout_s: float = TIMEOUT_S) -> Line:
    """The case's own line, or one that says how its process ended."""
    try:
        ended = subprocess.run(
            [sys.executable, "-m", MODULE, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {"case": name, "ok": False, "failed": f"no answer within {timeout_s:.0f} s"}
    try:
        line = json.loads(ended.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = ended.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        return {"case": name, "ok": False, "failed": f"exit code {ended.returncode}: {last[0]}"}
    if not isinstance(line, dict) or line.get("case") != name or "ok" not in line:
        return {"case": name, "ok": False, "failed": f"answered {ended.stdout[:200]!r}"}
    if line["ok"] and ended.returncode:  # it spoke, and fell while it closed the device
        return line | {"ok": False, "failed": f"exit code {ended.returncode} after its answer"}
    return line


def text(line: Line) -> str:
    """The line for a person."""
    verdict = "ok" if line["ok"] else "FAILED"
    begin = f"{verdict:<7} {line['case']:<40}"
    if line.get("failed"):
        return f"{begin} {line['failed']}"
    if line.get("why"):
        return f"{begin} not served: {line['why']}"
    return f"{begin} {'; '.join(_said(line))}"


def _said(line: Line) -> Iterator[str]:
    if line.get("error") is not None:
        yield f"error {line['error']:.1e} (bound {line['bound']:.0e})"
        yield f"{1e3 * line['seconds']:.3f} ms"
        registers = line["registers"]
        yield "registers " + " ".join(f"{name[3:]} {n}" for name, n in sorted(registers.items()))
        if line["spilled"]:
            yield f"SPILLS: {', '.join(line['spilled'])}"
    for ratio in line.get("ratios", ()):
        sign = "≥" if ratio["at_least"] else "≤"
        yield f"{ratio['name']} {ratio['value']:.3f} ({sign} {ratio['bound']:.2f})"
    for name, value in line.items():
        if name.endswith("_bytes_per_s"):
            yield f"{name.removesuffix('_bytes_per_s')} {value / 1e9:.1f} GB/s"
    if "name" in line:
        yield f"{line['name']}, CC {line['compute_capability']}"
        yield f"{line['multiprocessors']} multiprocessors, {line['memory_bytes'] / 2**30:.1f} GiB"
        yield f"driver for CUDA {line['driver']}, NVRTC {line['nvrtc']}"
        yield f"sources {line['sources']}"


def sanitizer_command(wrong: Sequence[str]) -> str:
    """The command to run for a case that failed; without one, for the first small case."""
    names = [name for name in wrong if name in gpu_case.exactness()]
    name = names[0] if names and names[0] != gpu_case.MACHINE else gpu_case.FIRST
    command = shlex.join([sys.executable, "-m", MODULE, name])
    return f"TIERING_CUDA_LINEINFO=1 compute-sanitizer --tool memcheck {command}"
