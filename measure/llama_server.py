"""Measures how a conversation goes on in llama-server after its slot was lost, in seven ways.

One run, the same model file, in turns: its rows still in the slot; computed anew (the baseline);
from a file of the slot (`--slot-save-path`), in the page cache and on a disk that was never read;
from the server's own cache of prompts (`--cache-ram`); and from our store, in memory and on a disk
that was never read. In the first way and with `--cache-ram` the server goes on, in all others it is
a new one. The sidecar goes on with its memory, and begins anew without it. Blocked is the longest
that another request had to wait for the main loop (`GET /slots`, asked every 10 ms: threads that
compute spin, so what asks more often takes their time). Turn 2 is the prompt and 32 more tokens,
each time others. Turn 1 is computed once by stock, which leaves the file of the slot, and once by
ours, which leaves the store; every round begins with these. Turn 2 is computed anew in the first
round only: it takes minutes, the others less than a second.

    python -m measure.llama_server --program P --stock S [--shape qwen3-0.6b] [--rounds 3]
                   [--tokens 4096,16384] [--threads 2] [--out docs/measurements/llama-server.md]
                   [--gpu FOLDER] [--model FILE]

With --gpu all layers are on the first NVIDIA card, by the libggml-cuda.so in that folder, which has
beside it what it needs. P and S are what scripts/llama_server.py makes:
FOLDER/build/bin/llama-server and FOLDER/stock/llama-server. It compiles with little optimisation
but for what computes and what copies rows, so times of the server itself are those of a slow build,
of both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from measure.own_sidecar import sidecar
from measure.running import arguments, publish
from ollama_tiering.bench.machine import begin
from ollama_tiering.launch.address import free_address
from ollama_tiering.launch.block_service import ask
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape

TAIL = 32
WAIT_SECONDS = 1800.0
ASK_EVERY_SECONDS = 0.01
REST_SECONDS = 1.0  # threads that have computed spin for a while
MIB = 1 << 20
FIRST, SECOND = "first.bin", "second.bin"  # a slot's rows after turns 1 and 2


@dataclass
class Turn:
    """What a way of going on costs. Milliseconds and bytes."""

    first_token: float
    waited: float  # of that, before the server began to compute
    blocked: float
    cached: int
    saving_blocked: float = 0.0
    written: int = 0
    memory: int = 0  # the server's, and what is kept of the prompt in memory beside it


@dataclass
class Server:
    """A llama-server on loopback, by its process id."""

    process: subprocess.Popen[bytes]
    port: int

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                raise OSError(said.decode(errors="replace"))
            return json.loads(said)

    def turn(self, tokens: list[int]) -> tuple[float, float, int]:
        """Milliseconds to the first token, those of them before the server began to compute, and
        how many tokens came from the cache.
        """
        began = time.perf_counter()
        said = self.ask("POST", "/completion", {
            "prompt": tokens, "n_predict": 1, "temperature": 0, "cache_prompt": True,
        })  # fmt: skip
        milliseconds, timings = 1e3 * (time.perf_counter() - began), said["timings"]
        return milliseconds, milliseconds - timings["prompt_ms"], int(timings["cache_n"])

    def slot_file(self, action: str, name: str) -> None:
        self.ask("POST", f"/slots/0?action={action}", {"filename": name})

    @property
    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[float]]:
        """Waits of other requests meanwhile; the longest counts."""
        waits, over = [0.0], threading.Event()

        def look() -> None:
            while not over.is_set():
                began = time.perf_counter()
                with contextlib.suppress(OSError):
                    self.ask("GET", "/slots")
                waits.append(1e3 * (time.perf_counter() - began))
                over.wait(ASK_EVERY_SECONDS)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield waits
        finally:
            over.set()
            watcher.join()


class Bench:
    """Of prompts of one length. `prepare` computes turn 1."""

    def __init__(self, given: argparse.Namespace, model: Path, tokens: int, folder: Path) -> None:
        self._given, self._model, self._folder = given, model, folder
        self._kept, self._cold = folder / "kept", folder / "cold"
        self._ram = Path("/dev/shm") / folder.name
        self._goes_on = contextlib.ExitStack()
        self._socket = ""  # of the sidecar that goes on
        self._rng = random.Random(tokens)
        self.first = [self._rng.randrange(5, 90) for _ in range(tokens)]
        self.second: list[int] = []
        self.other = [*(self._rng.randrange(90, 99) for _ in range(8))]

    def prepare(self) -> None:
        with self.server() as server:
            server.turn(self.first)
            server.slot_file("save", FIRST)
        self._socket = self._goes_on.enter_context(self._sidecar(self._kept, self._ram))
        with self.server(socket=self._socket) as server:
            server.turn(self.first)
            settle(self._socket)
        wait_written(self._socket, self._kept)
        shutil.copytree(self._kept, self._cold)

    def next_turn(self) -> None:
        self.second = [*self.first, *(self._rng.randrange(5, 90) for _ in range(TAIL))]

    def close(self) -> None:
        self._goes_on.close()
        shutil.rmtree(self._ram, ignore_errors=True)

    @contextlib.contextmanager
    def server(self, cache_mib: int = 0, socket: str = "") -> Iterator[Server]:
        program = self._given.program if socket else self._given.stock
        port = free_address().port
        options = ["-c", str(len(self.first) + 512), "-np", "1", "-t", str(self._given.threads)]
        options += ["--slot-save-path", f"{self._folder}/", "--no-webui", "--offline", "-fa", "on"]
        # a device is known only where it is the first option
        device = ["--device", "CUDA0", "-ngl", "99"] if self._given.gpu else []
        named = ["-m", self._model, "--port", str(port), "--host", "127.0.0.1"]
        command = [program, *device, *named, *options]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OLLAMA_", "LLAMA_"))}
        if self._given.gpu:
            env |= {"GGML_BACKEND_PATH": str(self._given.gpu / "libggml-cuda.so")}
            libraries = [str(self._given.gpu), os.environ.get("LD_LIBRARY_PATH", "")]
            env |= {"LD_LIBRARY_PATH": ":".join(filter(None, libraries))}
        env |= {"LLAMA_ARG_CACHE_RAM": str(cache_mib)}
        if socket:
            env |= {"OLLAMA_KV_TIER_ENGINE_SOCKET": f"{socket}.engine"}
            env |= {"OLLAMA_KV_TIER_GATE": "restore"}
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        server = Server(process, port)
        try:
            end = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    server.ask("GET", "/health")
                    break
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"error: no llama-server; read {self._folder}/log")
                time.sleep(0.1)
            server.turn(self.other)  # its first request is never measured
            time.sleep(REST_SECONDS)
            yield server
        finally:
            process.kill()
            process.wait()

    def go_on(self, server: Server) -> Turn:
        with server.watched() as waits:
            milliseconds, waited, cached = server.turn(self.second)
        return Turn(milliseconds, waited, max(waits), cached, memory=server.rss)

    def resident(self) -> Turn:
        with self.server() as server:
            server.slot_file("restore", FIRST)
            return self.go_on(server)

    def recompute(self) -> Turn:
        with self.server() as server:
            return self.go_on(server)

    def slot_file(self, *, cold: bool) -> Turn:
        if cold:
            drop_pages([self._folder / FIRST])
        with self.server() as server:
            with server.watched() as waits:
                began = time.perf_counter()
                server.slot_file("restore", FIRST)
                restored = 1e3 * (time.perf_counter() - began)
            turn = self.go_on(server)
            with server.watched() as saving:
                server.slot_file("save", SECOND)
        written = (self._folder / SECOND).stat().st_size
        blocked = max(turn.blocked, *waits)
        return replace(
            turn,
            first_token=restored + turn.first_token,
            waited=restored + turn.waited,
            blocked=blocked,
            saving_blocked=max(saving),
            written=written,
        )

    def cache_ram(self) -> Turn:
        with self.server(cache_mib=65536) as server:
            server.slot_file("restore", FIRST)
            with server.watched() as saving:
                server.turn(self.other)  # the slot is swapped out
            return replace(self.go_on(server), saving_blocked=max(saving))

    def ours(self, *, cold: bool) -> Turn:
        """In memory, or with nothing there and nothing of the disk in the page cache."""
        if not cold:
            return self._tiered(self._socket)
        ram = self._ram.with_name(f"{self._ram.name}-cold")
        drop_pages(self._cold.rglob("*.kvb"))
        try:
            with self._sidecar(self._cold, ram) as socket:
                return self._tiered(socket)
        finally:
            shutil.rmtree(ram, ignore_errors=True)

    def _tiered(self, socket: str) -> Turn:
        with self.server(socket=socket) as server:
            before = written(socket)
            turn = self.go_on(server)
            with server.watched() as saving:
                settle(socket, before)
            in_memory = sum(tier.used_bytes for tier in stat(socket).tiers[:1])
            new = written(socket) - before
        memory = turn.memory + in_memory
        return replace(turn, saving_blocked=max(saving), written=new, memory=memory)

    @contextlib.contextmanager
    def _sidecar(self, kept: Path, ram: Path) -> Iterator[str]:
        """Its socket."""
        options = ["--ram-dir", str(ram), "--ram-gb", str(self._given.ram_gb)]
        options += ["--local", str(kept), "--local-gb", str(2 * self._given.ram_gb)]
        with sidecar(options, "tail_seconds = 0\nmin_free_percent = 0") as (_, _, socket):
            yield socket


def stat(socket: str) -> Any:
    answer = ask(Path(socket))
    if answer is None:
        raise SystemExit("error: the sidecar does not answer")
    return answer


def written(socket: str) -> int:
    return int(stat(socket).put_bytes)


def settle(socket: str, before: int = -1) -> None:
    """Until nothing has been stored for a second."""
    last, since = before, time.monotonic()
    while time.monotonic() < since + 1:
        if (now := written(socket)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.02)


def wait_written(socket: str, kept: Path) -> None:
    """Until the disk has what memory has."""
    end = time.monotonic() + WAIT_SECONDS
    while stat(socket).tiers[1].blocks < stat(socket).tiers[0].blocks:
        if time.monotonic() > end:
            raise SystemExit(f"error: {kept} never got all blocks")
        time.sleep(0.1)


def drop_pages(files: Iterable[Path]) -> None:
    for path in files:
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


ANEW = "computed anew (baseline)"
WAYS: dict[str, Callable[[Bench], Turn]] = {
    "rows still in the slot": Bench.resident,
    ANEW: Bench.recompute,
    "a file of the slot, in the page cache": lambda bench: bench.slot_file(cold=False),
    "a file of the slot, on a cold disk": lambda bench: bench.slot_file(cold=True),
    "the server's own cache (`--cache-ram`)": Bench.cache_ram,
    "ours, in memory": lambda bench: bench.ours(cold=False),
    "ours, on a cold disk": lambda bench: bench.ours(cold=True),
}


def table(given: argparse.Namespace, model: Path, tokens: int) -> Iterator[str]:
    turns: dict[str, list[Turn]] = {name: [] for name in WAYS}
    with (
        tempfile.TemporaryDirectory(dir=given.disk) as folder,
        contextlib.closing(Bench(given, model, tokens, Path(folder))) as bench,
    ):
        bench.prepare()
        for turn in range(given.rounds):
            for name, way in WAYS.items():
                if name == ANEW and turn:
                    continue
                bench.next_turn()
                turns[name].append(way(bench))
                print(tokens, name, turns[name][-1], file=sys.stderr, flush=True)
    base = statistics.median(turn.first_token for turn in turns[ANEW])
    for name, found in turns.items():
        middle = {
            key: statistics.median(getattr(turn, key) for turn in found)
            for key in Turn.__dataclass_fields__
        }
        yield (
            f"| {tokens:,} | {name} | {middle['cached']:,.0f} | {middle['first_token']:,.0f} | "
            f"{base / middle['first_token']:.1f} | {middle['waited']:,.0f} | "
            f"{middle['blocked']:,.0f} | "
            f"{middle['saving_blocked']:,.0f} | {middle['written'] / MIB:,.1f} | "
            f"{middle['memory'] / MIB:,.0f} |"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ram-gb", type=int, default=4, help="the sidecar's memory")
    parser.add_argument("--gpu", type=Path, help="a folder with libggml-cuda.so")
    parser.add_argument("--model", type=Path, help="a GGUF instead of one that is made")
    parser.add_argument("--disk", type=Path, help="where files go; default: as for all programs")
    given = parser.parse_args()
    began = begin()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder) / "model.gguf"
        if not given.model:
            make_model(make_shape(given.shape), model)
        rows = [row for count in given.tokens.split(",") for row in table(given, model, int(count))]
    lines = [
        "",
        f"Medians of {given.rounds} rounds in turns (computed anew: once), model "
        f"{given.model or given.shape}, {given.threads} threads"
        f"{', all layers on CUDA0' * bool(given.gpu)}, one slot. "
        f"A prompt of so many tokens was computed; then it and {TAIL} more are sent. "
        "Gain is against computing all of it anew. Waited is what passed before the new tokens "
        "were computed, all that the rows took. Blocked is the longest that another request "
        "waited for the main loop: until the first token, and while the turn was saved "
        "afterwards. Written is what this turn's saving wrote; a file of the slot is "
        "written whole each turn and has no checksum, ours are checked. Memory is the server's, "
        "with the prompt in it, and for ours what the sidecar keeps in memory.",
        "",
        "| tokens | the rows come from | cached | first token, ms | gain | of it waited, ms | "
        "blocked, ms | "
        "blocked by saving, ms | written, MiB | memory, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    title = "llama-server: a conversation goes on after its slot was lost"
    publish("llama_server", title, began, "llama-server", lines, given.out)


if __name__ == "__main__":
    main()
