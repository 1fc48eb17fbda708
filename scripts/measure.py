#!/usr/bin/env python3
"""Maintainer: measures every record of docs/measurements anew, one after the other.

    scripts/measure.py                        hours (--list), on a machine that does nothing else
    scripts/measure.py --only restore.md,gate.md
    scripts/measure.py --long                 also the long ones that are left out else
    scripts/measure.py --list                 what would run, and how long it takes, about
    scripts/measure.py --index                only docs/measurements/README.md, from the records

Refuses where the tree has changes: a record names the commit it was measured with. Records written
before count as none, so a run that was stopped goes on with --only.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "docs/measurements"
LLAMA_SERVER = "build/llama-server"  # made by scripts/llama_server.py
_MEASURED = re.compile(r"^- Measured: (\S+), commit ([^,\n]+)", re.M)
_COMMAND = re.compile(r"^- Command: `([^`]+)`", re.M)


@dataclass(frozen=True, slots=True)
class Record:
    """One file of docs/measurements. `minutes`: about, on two idle cores."""

    file: str
    what: str
    against: str
    program: str  # the command without --out
    minutes: int
    needs: str = ""  # a file that it cannot do without
    long: bool = False  # measured only when named, or with --long
    settled: str = ""  # its question is; the program went, and this commit had it last
    writes_by_itself: bool = False

    @property
    def command(self) -> str:
        out = "" if self.writes_by_itself else f" --out {FOLDER}/{self.file}"
        return self.program + out

    @property
    def path(self) -> Path:
        return ROOT / FOLDER / self.file

    def run_by(self) -> str:
        """What measures it, for the index."""
        if self.settled:
            return f"`{self.program.removeprefix('scripts/')}` of {self.settled}"
        return f"`{self.command}`"

    def measured(self) -> str:
        """Date and commit by the record's own words."""
        if not self.path.exists():
            return "not yet"
        text = self.path.read_text(encoding="utf-8")
        found, command = _MEASURED.search(text), _COMMAND.search(text)
        if not found:
            return "before records said so"
        when = f"{found[1]}, {found[2]}"
        same = command and _parts(command[1]) == _parts(self.command)
        return when if same else f"{when}; by an older command"


_ONCE = {  # a record keeps the command of its day
    "tiering bench store": "python -m measure.store",
    "tiering bench attention": "python -m measure.attention",
    "tiering bench overhead": "python -m measure.overhead",
    "tiering bench peers": "python -m measure.peers",
    "scripts/bench_engine_socket.py": "measure.engine_socket",
    "scripts/bench_llama_server.py": "python -m measure.llama_server_loop",
    "scripts/cuda_resources.py": "scripts/attention/cuda_resources.py",
    "scripts/measure_llama_server.py": "python -m measure.llama_server",
    "scripts/measure_first_run.py": "python -m measure.first_run",
}


def _parts(command: str) -> list[str]:
    """By the names of today, and without what changes no figure."""
    for once, now in _ONCE.items():
        if f"{command} ".startswith(f"{once} "):
            command = now + command.removeprefix(once)
    return [part for part in shlex.split(command) if part != "-q"]


_STOCK = "the same prompt computed by ours, by stock at its best, by stock as it comes"
_ATTENTION = "f64; ggml of the same source; the machine's peaks"
RECORDS = (
    Record("restore.md", "time to the first token restored after a restart, Q8_0", _STOCK,
           "tiering bench restore --cpu native --tokens 2048,8192", 20),
    Record("restore-q4km.md", "the same, Q4_K_M", _STOCK,
           "tiering bench restore --cpu native --shape qwen3-0.6b-q4km --tokens 2048,8192", 20),
    Record("restore-llama.md", "the same, a Llama of 1B in Q8_0 on the llama.cpp engine", _STOCK,
           "tiering bench restore --cpu native --shape llama-3.2-1b --tokens 2048,8192", 12),
    Record("restore-gemma3.md", "the same, a Gemma 3 of 4B with sliding windows, 2,048 tokens only",
           _STOCK, "tiering bench restore --cpu native --shape gemma3-4b --tokens 2048", 10),
    Record("restore-gemma3-8k.md", "the same, 8,192 tokens only; measured with `--long` only",
           _STOCK, "tiering bench restore --cpu native --shape gemma3-4b --tokens 8192", 25,
           long=True),
    Record("cpu-attention.md", "exact attention inside Ollama, Q8_0",
           "stock's attention of the same binary, with and without flash attention",
           "tiering bench cpu-attention --cpu native", 15),
    Record("cpu-attention-q4km.md", "the same, Q4_K_M",
           "stock's attention of the same binary, with and without flash attention",
           "tiering bench cpu-attention --cpu native --shape qwen3-0.6b-q4km", 15),
    Record("peers.md", "ours beside other programs on the same model file, Q8_0; 3 runs, with "
           "8,192 tokens one", "stock, llama.cpp, ik_llama.cpp, with and without flash attention",
           "python -m measure.peers --cpu native --tokens 2048,8192 --repeat 3,1 "
           "--short default", 15),
    Record("overhead.md", "what tiering costs with nothing to restore, Q8_0",
           "the same binary with tiering off, the same attention",
           "python -m measure.overhead --cpu native --pairs 40 --bursts 1", 20),
    Record("overhead-q4km.md", "the same, Q4_K_M",
           "the same binary with tiering off, the same attention",
           "python -m measure.overhead --cpu native --shape qwen3-0.6b-q4km --pairs 18 "
           "--bursts 4", 20),
    Record("overhead-llama.md", "the same, a Llama of 1B in Q8_0 on the llama.cpp engine",
           "the same binary with tiering off, the same attention",
           "python -m measure.overhead --cpu native --shape llama-3.2-1b --pairs 18 "
           "--bursts 4", 18),
    Record("gate.md", "whether the gate chooses the better side", "restore and recompute, forced",
           "tiering bench gate --cpu native --shape qwen3-tiny --repeat 15 "
           "--tokens 40,66,96,128,512,2048", 10),
    Record("store.md", "the store by itself", "memcpy, the disk, and bounds in the table",
           "python -m measure.store --only restore,put,lookup,scale,weather", 20),
    Record("store-soak.md", "memory of the sidecar under load for half an hour",
           "its own second quarter", "python -m measure.store --only scale --soak 30", 40),
    Record("store-index.md", "a start of the store with the index of its local tier",
           "the same start without it; a plain program that reads every header",
           "python -m measure.store --only index", 5, settled="081bb58"),
    Record("store-encoding.md", "encodings of stored blocks", "raw rows",
           "python -m measure.store --only encoding", 5, settled="081bb58"),
    Record("encoding.md", "encodings of K/V rows, more of them", "raw rows; memcpy",
           "scripts/bench_encoding.py --trained build/trained.npz", 5, settled="6b62c8c"),
    Record("first-run.md", "a fresh clone: first help, demo, build, up", "the bounds in the table",
           "python -m measure.first_run --source /tmp/ollama.git", 5),
    Record("cold-restore.md", "blocks of a cold disk: page cache or direct, raw or encoded",
           "each other", "scripts/bench_cold_restore.py --blocks 24", 2,
           settled="6b62c8c"),
    Record("sidecar-rpc.md", "the sidecar's transport: thread pool or asyncio", "each other",
           "scripts/bench_sidecar_rpc.py", 1, settled="6b62c8c"),
    Record("engine-socket.md", "look-ups on the engine socket", "the same through gRPC; a bound",
           "measure.engine_socket", 3, settled="d73c15f"),
    Record("llama-server.md", "llama-server: a conversation goes on after its slot was lost",
           "computed anew; its slot's file; its own --cache-ram",
           f"python -m measure.llama_server --program {LLAMA_SERVER}/build/bin/llama-server "
           f"--stock {LLAMA_SERVER}/stock/llama-server", 70,
           f"{LLAMA_SERVER}/build/bin/llama-server"),
    Record("llama-server-4k.md", "the same, 4,096 tokens only, in more rounds",
           "computed anew; its slot's file; its own --cache-ram",
           f"python -m measure.llama_server --program {LLAMA_SERVER}/build/bin/llama-server "
           f"--stock {LLAMA_SERVER}/stock/llama-server --tokens 4096 --rounds 7", 12,
           f"{LLAMA_SERVER}/build/bin/llama-server"),
    Record("llama-server-loop.md", "what the tiering costs llama-server's main loop",
           "stock; a plain copy; bounds",
           f"python -m measure.llama_server_loop {LLAMA_SERVER}/build/bin/llama-server "
           f"{LLAMA_SERVER}/stock/llama-server --tokens 2048 --rounds 10 --pairs 200", 3,
           f"{LLAMA_SERVER}/build/bin/llama-server"),
    Record("attention.md", "the attention kernels by themselves", _ATTENTION,
           "python -m measure.attention --rounds 2", 30),
    Record("attention-avx2.md", "the same with AVX2", _ATTENTION,
           "python -m measure.attention --isa avx2 --only prefill,decode,quant --rounds 2", 20),
    Record("attention-limits.md", "decode beside what limits it", _ATTENTION,
           "python -m measure.attention --only decode,quant --rounds 3", 15),
    Record("gpu.md", "an NVIDIA card, lent for some minutes",
           "stock's library on the same card; copies of pinned memory", "scripts/gpu_day run", 15,
           "build/gpu_day/pack.tar.xz", long=True, writes_by_itself=True),
    Record("cuda-resources.md", "what the CUDA kernels use, by the assembler", "no spills",
           "scripts/attention/cuda_resources.py", 30, writes_by_itself=True),
)  # fmt: skip

_INTRODUCTION = """\
# Measurements

Written by `scripts/measure.py --index`; `make measurements` measures all of it anew, from one
commit without changes, on a machine that does nothing else. Every record begins with its machine,
the load average beside the number of cores, its date and commit, and its command; `tiering` is
`scripts/tiering`, and `python`, which also runs the scripts, `.venv/bin/python`.

**Gain** means: against a cold run of the same engine, with the attention that `tiering up` uses.
Two more columns of `bench restore` stand beside it and are never the headline: against stock's best
(the faster of with and without flash attention) and against stock's default (as Ollama runs the
model unless told otherwise). Models have random weights and a vocabulary of 259 tokens, in the
geometry of Qwen3-0.6B unless `--shape` names Llama-3.2-1B or the text half of Gemma-3-4B.
"""


def index() -> str:
    """docs/measurements/README.md."""
    rows = [
        f"| [{r.file}]({r.file}) | {r.what} | {r.against} | {r.run_by()} | {r.minutes} | "
        f"{r.measured()} |"
        if r.path.exists()
        else f"| {r.file} | {r.what} | {r.against} | {r.run_by()} | {r.minutes} | not yet |"
        for r in RECORDS
    ]
    lines = [
        _INTRODUCTION,
        "| record | what | against | command | minutes, about | measured: date, commit |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        "A command with a commit behind it is of a program that went, its question settled; that",
        "commit has it: those of 6b62c8c in its `scripts`, with `train_tiny.py`, which made",
        "`build/trained.npz`.",
        f"`{LLAMA_SERVER}` comes from `make llama-server FOLDER={LLAMA_SERVER}`.",
    ]
    return "\n".join(lines) + "\n"


def changes(root: Path) -> str:
    """What git says has changed, records apart."""
    command = ["git", "status", "--porcelain", "--", ".", f":(exclude){FOLDER}"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def arguments_of(command: str) -> list[str]:
    """A listed command, run by this Python."""
    program, *rest = shlex.split(command)
    runs = {"tiering": ["-m", "ollama_tiering"], "python": []}.get(program, [program])
    return [sys.executable, *runs, *rest]


def measure(records: list[Record]) -> list[str]:
    """Files of those that failed. What lacks a file it needs is left out, and it is said."""
    failed = []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for record in records:
        if record.needs and not (ROOT / record.needs).exists():
            print(f"left out: {record.file}, there is no {record.needs} (see --index)", flush=True)
            continue
        if record.settled:
            print(f"left out: {record.file}, commit {record.settled} has its program", flush=True)
            continue
        print(f"== {record.file}, about {record.minutes} min: {record.command}", flush=True)
        started = time.monotonic()
        done = subprocess.run(arguments_of(record.command), cwd=ROOT, env=environment, check=False)
        print(f"-- {(time.monotonic() - started) / 60:.1f} min, exit code {done.returncode}")
        if done.returncode:
            failed.append(record.file)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="files")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--index", action="store_true")
    given = parser.parse_args()
    usual = [r.file for r in RECORDS if not r.settled and (given.long or not r.long)]
    wanted = given.only.split(",") if given.only else usual
    if unknown := set(wanted) - {r.file for r in RECORDS}:
        parser.error(f"no such record: {', '.join(sorted(unknown))}")
    records = [r for r in RECORDS if r.file in wanted]
    failed: list[str] = []
    if not given.index:
        total = sum(r.minutes for r in records)
        print(f"{len(records)} records, about {total} minutes on two idle cores", flush=True)
    if given.list:
        print("\n".join(f"{r.minutes:4} min  {r.command}" for r in records))
        return 0
    if not given.index:
        if changed := changes(ROOT):
            print(f"the tree has changes; commit them, or put them away:\n{changed}", end="")
            return 1
        failed = measure(records)
    (ROOT / FOLDER / "README.md").write_text(index(), encoding="utf-8")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
