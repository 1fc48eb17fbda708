"""Measures what the tiering costs llama-server's main loop, which serves all slots.

    python -m measure.llama_server_loop PATCHED STOCK [--tokens 4096] [--rounds 12] [--out FILE]

PATCHED and STOCK are llama-servers of one source: scripts/llama_server.py makes both. Restoring:
the rows of one prompt come back again and again into the slot of an idle server, then into a
slot beside one that streams. Resident: prompts whose rows a slot holds already, sent to both
programs in turns, each pair in the other order; the baseline of the difference is stock. Each
figure is a median with its quartiles.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy

from measure.own_sidecar import sidecar
from measure.running import arguments, publish
from ollama_tiering.bench.machine import begin
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.engine_llama_server.server import LlamaServer

WIDE, SMALL = "kv-wide", "llama-tiny"  # of the small one a request takes little time
WORDS = range(1, 90)
LOOP_BOUND_MS = 200.0  # per GiB
WARM_BOUND_MS = 2.0
LINE = re.compile(r"restored \d+ rows .* ([\d.]+) MiB: look-up ([\d.]+) ms, reading ([\d.]+) ms, "
                  r"copying ([\d.]+)")  # fmt: skip
WAIT_SECONDS = 600.0
PAUSE_SECONDS = 0.15  # what is stored of an answer comes after it
BLOCK_BYTES = 4 << 20


def text(count: int, first: int) -> list[int]:
    return [first, *(random.choice(WORDS) for _ in range(count - 1))]


def spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def restored(server: LlamaServer) -> list[tuple[float, float, float, float]]:
    """Of each restored prompt GiB, and ms of look-up, reading and copying, as its log says."""
    found = LINE.findall(server.log.read_text(errors="replace"))
    return [(float(mib) / 1024, float(a), float(b), float(c)) for mib, a, b, c in found]


def come_back(server: LlamaServer, prompt: list[int], rounds: int) -> tuple[list[float], ...]:
    """Of each time: ms of the whole request, and ms of processor time of the main loop beyond that
    of the same request when the slot holds the rows. Another prompt makes the slot forget them.
    """
    passed, worked = [], []
    for first in range(rounds):
        server.complete(text(1, 100 + first), 1, id_slot=1)
        before, started = main_loop_ms(server), time.monotonic()
        cached = server.complete([*prompt, 1], 1, id_slot=1).cached
        passed.append(1e3 * (time.monotonic() - started))
        between = main_loop_ms(server)
        held = server.complete([*prompt, 2], 1, id_slot=1).cached
        worked.append(2 * between - before - main_loop_ms(server))
        if (cached, held) != (len(prompt), len(prompt)):
            raise SystemExit(f"{cached} rows came back, {held} stayed, of {len(prompt)}")
    return passed, worked


def main_loop_ms(server: LlamaServer) -> float:
    """Processor time of the first thread, which is the main loop."""
    assert server.process is not None
    pid = server.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6


def plain_copy_ms(gib: float) -> float:
    """Block by block from memory to memory: what the same bytes take in the same minutes."""
    count = max(1, round(gib * (1 << 30) / BLOCK_BYTES))
    source = numpy.ones((count, BLOCK_BYTES), numpy.uint8)
    target = numpy.ones_like(source)  # its pages are there
    started = time.perf_counter()
    for index in range(count):
        target[index] = source[index]
    return 1e3 * (time.perf_counter() - started) / gib


class Stream:
    """Beside it: tokens in the first slot, and when they came. A context manager."""

    def __init__(self, server: LlamaServer) -> None:
        self._tokens = server.stream(text(64, 3), 4000, id_slot=0)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._ending = False
        self.times: list[float] = []

    def __enter__(self) -> Stream:
        self._thread.start()
        while len(self.times) < 20:
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._thread.join()

    def _read(self) -> None:
        for at in self._tokens:
            self.times.append(at)
            if self._ending:
                return

    def gaps_ms(self, start: float) -> list[float]:
        return [1e3 * (later - at) for at, later in pairwise(self.times) if at > start]


def store(server: LlamaServer, prompt: list[int]) -> None:
    """Until all of it is stored: a prompt of the same, beside it, lacks nothing."""
    server.complete(prompt, 1, id_slot=1)
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        time.sleep(1)
        server.complete([90], 1, id_slot=1)
        if server.complete([*prompt, 1], 1, id_slot=1).cached == len(prompt):
            return
    raise SystemExit("it was not stored in time")


def restoring(
    program: Path, model: Path, log: Path, socket: str, given: argparse.Namespace
) -> list[str]:
    options = ("-fa", "on", "-np", "2", "--no-kv-unified", "-c", str(2 * given.tokens + 12000))
    prompt = text(given.tokens, 2)
    with LlamaServer(program, model, log, *options, sidecar=Path(f"{socket}.engine")) as server:
        store(server, prompt)
        before = len(restored(server))
        gib = len(prompt) * make_shape(WIDE).kv_bytes_per_token / (1 << 30)
        idle: list[float] = []
        worked: list[float] = []
        plain: list[float] = []
        for _ in range(given.rounds):
            passed, work = come_back(server, prompt, 1)
            idle += passed
            worked += work
            plain.append(plain_copy_ms(gib))
        alone = restored(server)[before:]
        with Stream(server) as stream:
            quiet = time.monotonic()
            time.sleep(3)
            usual = stream.gaps_ms(quiet)
            started = time.monotonic()
            come_back(server, prompt, given.rounds)
            beside = stream.gaps_ms(started)
        streamed = restored(server)[before + given.rounds :]
    per_gib = [one / gib for one in worked]
    lines = [
        f"{given.rounds} times {gib:.3f} GiB come back. The main loop's processor time for them, "
        f"without that of the same request when the slot holds them: **{spread(per_gib)} ms per "
        f"GiB**; bound {LOOP_BOUND_MS:.0f}. A request in which they come back takes "
        f"{spread(idle)} ms in all. By the clock, per GiB, which also counts what else the machine "
        "does:",
        "",
        "| | look-up (ms) | reading, checking (a thread) | copying (the main loop) | least |",
        "|---|---|---|---|---|",
    ]
    for name, ones in (("idle", alone), ("beside a stream", streamed)):
        looked = spread([one[1] for one in ones])
        read, copied = ([one[i] / one[0] for one in ones] for i in (2, 3))
        lines.append(
            f"| {name} | {looked} | {spread(read)} | {spread(copied)} | {min(copied):.0f} |"
        )
    lines += [
        f"| a plain copy, in turns with it | | | {spread(plain)} | {min(plain):.0f} |",
        "",
        "| gaps between tokens of the stream | median (ms) | 99 of 100 | longest |",
        "|---|---|---|---|",
    ]
    for name, gaps in (("nothing else", usual), ("while rows come back", beside)):
        late = statistics.quantiles(gaps, n=100)[98]
        lines.append(f"| {name} | {statistics.median(gaps):.1f} | {late:.1f} | {max(gaps):.1f} |")
    return lines


def resident(
    programs: Sequence[Path], model: Path, logs: Path, socket: str, given: argparse.Namespace
) -> list[str]:
    options = ("-fa", "on", "-np", "1", "-c", str(given.tokens + 8192))
    prompt = text(given.tokens, 2)
    lines = [
        "| a prompt whose rows the slot holds | stock (ms) | difference (ms) | bound |",
        "|---|---|---|---|",
    ]
    with (
        LlamaServer(
            programs[0], model, logs / "p", *options, sidecar=Path(f"{socket}.engine")
        ) as ours,
        LlamaServer(programs[1], model, logs / "s", *options) as stock,
    ):
        for name, prompts in kinds(prompt, given.pairs).items():
            for server in (ours, stock):
                server.complete(prompt, 1)
            time.sleep(2)  # what it stores
            taken: dict[LlamaServer, list[float]] = {ours: [], stock: []}
            for index, tokens in enumerate(prompts):
                for server in (ours, stock) if index % 2 else (stock, ours):
                    started = time.perf_counter()
                    server.complete(tokens, 1)
                    taken[server].append(1e3 * (time.perf_counter() - started))
                    time.sleep(PAUSE_SECONDS)
            more = [a - b for a, b in zip(taken[ours], taken[stock], strict=True)]
            lines.append(f"| {name} | {spread(taken[stock])} | {spread(more)} | {WARM_BOUND_MS} |")
    return lines


def kinds(prompt: list[int], pairs: int) -> dict[str, list[list[int]]]:
    turns, longer = [], list(prompt)
    for _ in range(pairs):
        longer = [*longer, *text(30, 5)]
        turns.append(longer)
    return {
        "with another last token": [[*prompt[:-1], 100 + i % 150] for i in range(pairs)],
        "the next turn, 30 tokens longer": turns,
        "with another end of 200 tokens, which is looked up": [
            [*prompt[:-200], *text(200, 100 + i % 150)] for i in range(pairs)
        ],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("patched", type=Path, metavar="PATCHED")
    parser.add_argument("stock", type=Path, metavar="STOCK")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=40)
    given = parser.parse_args()
    began = begin()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
        tempfile.TemporaryDirectory() as folder,
    ):
        wide, small = Path(folder) / "wide.gguf", Path(folder) / "small.gguf"
        make_model(make_shape(WIDE), wide)
        make_model(make_shape(SMALL), small)
        options = ["--ram-dir", f"{ram}/r", "--ram-gb", "2", "--local", f"{folder}/l"]
        with sidecar([*options, "--local-gb", "0"]) as (_, _, socket):
            parts: list[Callable[[], list[str]]] = [
                lambda: restoring(given.patched, wide, Path(folder) / "log", socket, given),
                lambda: resident((given.patched, given.stock), small, Path(folder), socket, given),
            ]
            lines = [line for part in parts for line in (*part(), "")]
    models = f"{make_shape(WIDE).words}; for resident prompts {make_shape(SMALL).words}"
    lines = [f"- Model: {models}", "", *lines[:-1]]
    publish("llama_server_loop", "The main loop of llama-server", began, "", lines, given.out)


if __name__ == "__main__":
    main()
