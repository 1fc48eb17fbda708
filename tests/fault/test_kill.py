"""kill -9 at bad moments: what is found afterwards is whole, counted, and byte for byte right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta, verify_payload
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from tests.tokens import tokens_from_bytes
from tests.unit.store.support import NS

pytestmark = pytest.mark.fault

WRITER = """
import os, signal, sys
from pathlib import Path
from measure.store import samples
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiered import TieredStore
from tests.unit.store.support import NS, BLOCK_TOKENS
root, moment = Path(sys.argv[1]), sys.argv[2]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

ram, local = (FsTier(kind, root / kind.label) for kind in (TierKind.RAM, TierKind.LOCAL))
tiers = [(ram, 1 << 20), (local, 300_000)]
index = root / "index.sqlite"
store = TieredStore(tiers, index_path=index, measure=False, background=moment == "any")
session = store.open_session(NS.digest(), NS.fields(), BLOCK_TOKENS)
rename = os.rename
renames = []

def counted(*args, **kwargs):
    if any(str(a).endswith(".kvb") for a in args):
        renames.append(args)
        if len(renames) == 3 and moment == "before rename":
            die()
        rename(*args, **kwargs)
        if len(renames) == 3 and moment == "after rename":
            die()
    else:
        rename(*args, **kwargs)

os.rename = counted
print("ready", flush=True)
number = 0
while True:
    tokens = [number % 7, number % 3, *range(number, number + number % 30)]
    blocks = samples.sequence(NS, tokens)
    for block, reserved in zip(blocks, session.reserve([b.offer for b in blocks])):
        if reserved.path is None:
            continue
        if moment == "half written" and number == 5:
            with open(reserved.path, "r+b") as file:
                file.write(block.data[:5000])
            die()
        Path(reserved.path).write_bytes(block.data)
        if moment == "before commit" and number == 5:
            die()
        session.commit([reserved.reservation_id])
    number += 1
    if moment in ("write down",) and number == 4:
        os.fsync = lambda fd: "/v1/" in os.readlink(f"/proc/self/fd/{fd}") and die()
        store.run_pending()
"""


def run_until_killed(root: Path, moment: str, seconds: float | None = None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), moment],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "ready\n"
        if seconds is not None:
            time.sleep(seconds)
            process.kill()
        assert process.wait(60) == -signal.SIGKILL


def check(root: Path) -> int:
    """Opens what is left; everything in it must be right. How many blocks there are."""
    tiers: list[tuple[Tier, int]] = [
        (FsTier(TierKind.RAM, root / "ram"), 1 << 20),
        (FsTier(TierKind.LOCAL, root / "local"), 300_000),
    ]
    index = root / "index.sqlite"
    store = TieredStore(tiers, index_path=index, measure=False, background=False)
    try:
        assert not [*root.rglob("*.tmp")]
        assert not [*root.rglob("*.bad")]
        for tier, budget in tiers:
            assert tier.directory is not None
            files = [*tier.directory.rglob("*.kvb")]
            assert physical_bytes(tier.directory) <= budget
            for file in files:
                data = file.read_bytes()
                meta = read_meta(buffer_reader(data), len(data))
                verify_payload(meta, buffer_reader(data))
                assert file.stem == meta.key.hex()
        records = list(store._state.tree)
        for record in records:
            leased = store.lease(record.namespace, [record.key])
            (block,) = leased.blocks
            data = store.read_part(block, 0, block.file_bytes)
            assert data == expected(store, record.key)
        report = store.report()
        for tier_report in report.tiers:
            assert tier_report.reserved_bytes == 0
        return len(records)
    finally:
        store.close()


def physical_bytes(root: Path) -> int:
    """Everything: blocks, directories, counts, locks."""
    return sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")])


def expected(store: TieredStore, key: bytes) -> bytes:
    """The block's file as its writer made it: it follows from the tokens of its whole chain."""
    chain = list(store._state.tree.ancestors(key))[::-1]
    tokens = [token for record in chain for token in tokens_from_bytes(record.tokens)]
    return samples.sequence(NS, tokens)[-1].data


@pytest.mark.parametrize(
    "moment", ["half written", "before commit", "before rename", "after rename", "write down"]
)
def test_a_kill_at_a_bad_moment_leaves_whole_blocks_only(tmp_path: Path, moment: str) -> None:
    run_until_killed(tmp_path, moment)
    assert check(tmp_path) > 0


def test_kills_at_random_moments_in_a_row(tmp_path: Path) -> None:
    rng = random.Random(7)
    for _ in range(6):
        run_until_killed(tmp_path, "any", rng.uniform(0.05, 0.6))
        assert check(tmp_path) > 0
