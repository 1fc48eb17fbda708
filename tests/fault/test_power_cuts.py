"""The power fails at any moment of a store's work: what docs/operations.md promises holds.

The work is recorded (recorder.py) and cut after any of its operations; of what was not synced by
then the disk keeps nothing, all, or anything (disk_model.py). The store is opened on each state
with its own code. `make power-cuts` looks at many more of them.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.tiers.names import BLOCK_SUFFIX
from tests.fault.disk_model import Choose, Disk, Name, Op, Unname, Write, after_cut
from tests.fault.power_cut_checks import check
from tests.fault.power_cut_work import LOCAL, SameThread, Setting, Work

pytestmark = pytest.mark.fault

STATES = int(os.environ.get("TIERING_POWER_CUTS", "400"))  # in all, over the settings
STATES_PER_WORK = 250
STEPS = 40
SETTINGS = {
    "ample": Setting(),
    "encoded": Setting(encoding=Encoding.ZSTD),
    "no RAM tier": Setting(ram_blocks=0),
    "full": Setting(ram_blocks=12, local_blocks=24, evicts=True),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: SQLite's own syncs take most of the time on a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def one_thread_and_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ollama_tiering.store.upkeep.mover.DaemonPool", SameThread)
    monkeypatch.setattr("ollama_tiering.store.tiers.unsynced.DaemonPool", SameThread)
    # Wherever the tests' files lie: the tier is to take it for a disk.
    monkeypatch.setattr("ollama_tiering.store.tiers.directory.in_memory", lambda directory: False)


def kept(rng: random.Random) -> list[Choose]:
    """What a disk may keep of that which was not synced."""
    share = rng.choice([0.1, 0.5, 0.9])

    def anything(op: Op) -> bool | set[int]:
        if isinstance(op, Write) and rng.random() < 0.5:
            return {at for at in op.sectors if rng.random() < share}
        return rng.random() < share

    return [
        lambda op: False,
        lambda op: True,
        lambda op: isinstance(op, Name | Unname),  # names before what they stand for
        lambda op: not isinstance(op, Name | Unname),
        lambda op: not isinstance(op, Write),  # sizes without bytes
        anything,
        anything,
        anything,
    ]


def cuts(work: Work, rng: random.Random) -> Iterator[tuple[str, int, Disk]]:
    """Without end: states of the disk after one of the operations."""
    ops = work.recorder.ops
    while True:
        at = rng.randint(0, len(ops))
        for number, choose in enumerate(kept(rng)):
            yield f"kept #{number}", at, after_cut(ops[:at], work.recorder.kinds, choose)


def put_index(work: Work, at: int, directory: Path, rng: random.Random) -> str:
    """The index is a cache: any of it, whole or torn, or none. Says which."""
    kind = rng.choice(["none", "last", "any", "torn"])
    before = [files for taken, files in work.indexes if taken <= at]
    chosen = before[-1:] if kind == "last" else [files for _, files in work.indexes]
    if kind == "none" or not chosen or not directory.is_dir():
        return "none"
    for name, content in rng.choice(chosen).items():
        torn = bytearray(content)
        if kind == "torn" and torn:
            start = rng.randrange(len(torn))
            end = min(len(torn), start + rng.choice([1, 512, 4096, len(torn)]))
            torn[start:end] = bytes(end - start)
            if rng.random() < 0.3:
                del torn[rng.randrange(len(torn)) :]
        (directory / name).write_bytes(torn)
    return kind


def written_bytes(work: Work, at: int) -> int:
    """To blocks of the local tier, at least."""
    named = [op for op in work.recorder.ops[:at] if isinstance(op, Name) and op.old is not None]
    nodes = {op.node for op in named if op.name.endswith(BLOCK_SUFFIX)}
    return sum(len(work.recorder.now.nodes[node].content) for node in nodes)


@pytest.mark.timeout(60 + STATES)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_nothing_safe_is_lost_and_no_byte_is_wrong(setting: Setting, place: Path) -> None:
    wanted = STATES // len(SETTINGS)
    looked_at: set[str] = set()
    seed = 0
    for seed in range(-(-wanted // STATES_PER_WORK)):
        work = Work(place / f"work-{seed}", setting, seed)
        work.run(STEPS)
        rng = random.Random(seed)
        for how, at, disk in cuts(work, rng):
            root = place / "after"
            disk.write_to(root)
            index = put_index(work, at, root / LOCAL, rng)
            said = f"seed {seed}, cut after {at} of {len(work.recorder.ops)}, {how}, index {index}"
            try:
                check(work, root, work.promise_after(at), written_bytes(work, at))
            except Exception as error:
                raise AssertionError(said) from error
            shutil.rmtree(root)
            looked_at.add(said)
            if len(looked_at) >= min(wanted, (seed + 1) * STATES_PER_WORK):
                break
    assert len(looked_at) >= wanted
    print(f"{len(looked_at)} states of {seed + 1} recordings")
