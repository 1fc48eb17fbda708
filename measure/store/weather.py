"""Hits in RAM while the remote tier hangs, compared with the same hits while it works."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from measure.results import Ratio, Section
from measure.store.rig import LAYER_BYTES, ROWS, RandomBlocks, StoreRig
from ollama_tiering.store import RemoteTier, SharedFsTier

_CALLS: Final = 3000
_BLOCKS: Final = 32
_DEADLINE_SECONDS: Final = 0.2
_REMOTE_CALLS: Final = (
    "scan", "create", "publish", "discard", "open", "remove", "describe", "drop_pages", "probe",
    "announce", "neighbours", "touch", "exists",
)  # fmt: skip


class StoppingTier(SharedFsTier):
    """A remote directory in which every call waits, as in the kernel, until `go_on` is set."""

    def __init__(self, directory: Path, go_on: threading.Event) -> None:
        self.go_on = go_on
        super().__init__(directory)

    def __getattribute__(self, name: str) -> Any:
        if name in _REMOTE_CALLS:
            super().__getattribute__("go_on").wait()
        return super().__getattribute__(name)


def measure(disk: Path, say: Callable[[str], None]) -> Section:
    say("hits in RAM while the remote tier hangs")
    healthy, _ = _with_remote(disk, hangs=False)
    hanging, stalled = _with_remote(disk, hangs=True)
    if not stalled:
        raise RuntimeError("no call of the remote tier hung")
    notes = [
        f"Look-up and lease of {_BLOCKS} blocks in RAM, {_CALLS:,} times. In the second store "
        f"every call of the remote tier hung from the start; {stalled} never came back.",
    ]
    ratio = Ratio(
        "p99 of hits in RAM, remote hangs",
        f"{1e6 * hanging:.0f} µs",
        f"remote healthy, {1e6 * healthy:.0f} µs",
        hanging / healthy,
        2.0,
        at_most=True,
    )
    return Section("weather", "A remote tier that hangs", "÷ healthy", [ratio], notes)


def _with_remote(disk: Path, *, hangs: bool) -> tuple[float, int]:
    """(p99 of the seconds of a hit in RAM, calls of the remote tier that hang)."""
    blocks = RandomBlocks.of(LAYER_BYTES, _BLOCKS * LAYER_BYTES)
    directory = Path(tempfile.mkdtemp(dir=disk, prefix="tiering-bench-"))
    go_on = threading.Event()
    if not hangs:
        go_on.set()
    remote = RemoteTier(
        directory, lambda: StoppingTier(directory, go_on), deadline_seconds=_DEADLINE_SECONDS
    )
    rig = StoreRig(disk, _BLOCKS * LAYER_BYTES, background=True, remote=remote)
    try:
        rig.put(blocks, list(blocks.files()))
        time.sleep(2 * _DEADLINE_SECONDS)
        hits(rig, blocks)
        return hits(rig, blocks), remote.stalled
    finally:
        go_on.set()
        rig.close()
        shutil.rmtree(directory, ignore_errors=True)


def hits(rig: StoreRig, blocks: RandomBlocks) -> float:
    """p99 of the seconds."""
    seconds = []
    namespace = blocks.ns.digest()
    for _ in range(_CALLS):
        start = time.perf_counter()
        found = rig.store.match(namespace, blocks.keys, blocks.tokens, ROWS)
        leased = rig.store.lease(namespace, blocks.keys)
        rig.store.release(leased.lease_id)
        seconds.append(time.perf_counter() - start)
        if len(found) != len(leased.blocks) or len(found) != len(blocks.keys):
            raise RuntimeError(f"{len(found)} of {len(blocks.keys)} blocks were there")
    return statistics.quantiles(seconds, n=100)[98]
