"""The store is opened again for a tier that comes back: signals and settings outlive it."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ollama_tiering.config import MIB
from ollama_tiering.sidecar import openings
from ollama_tiering.sidecar.openings import Openings
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books.report import AbsentTier
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.system.filesystems import in_memory
from tests.sidecar import STOP_SECONDS
from tests.unit.sidecar.test_reload import FileSidecar

RUN = "\nfrom ollama_tiering.__main__ import main\nmain()\n"
SIGNALLED = {
    "stopping": """
import os
from ollama_tiering.sidecar import server
real, done = server.GrpcSocket.stop, []
async def stop(self, grace_seconds):
    if not done:
        done.append(os.kill(os.getpid(), NUMBER))
    await real(self, grace_seconds)
server.GrpcSocket.stop = stop
""",
    "opening": """
import os
from ollama_tiering.sidecar import server
real, opened = server.open_store, []
def open_store(*args, **options):
    opened.append(True)
    if len(opened) == 2:
        os.kill(os.getpid(), NUMBER)
    return real(*args, **options)
server.open_store = open_store
""",
}
HANGS = """
import time
from ollama_tiering.sidecar import server
from ollama_tiering.store import tiered
from ollama_tiering.store.upkeep.index_keeper import IndexKeeper
server._DRAIN_SECONDS = tiered._SAVE_SECONDS = 0.2
IndexKeeper.close = lambda self: time.sleep(1000)
"""


class Returning(FileSidecar):
    """Its local tier's disk is not mounted at the start."""

    def __init__(self, root: Path, before: str = "") -> None:
        if in_memory(root):
            pytest.skip("in memory every directory of a path is made")
        super().__init__(root)
        self.local_dir = root / "mnt" / "usb"
        self.before = before
        self.write('ram_budget = "8MB"\nlocal_budget = "8MB"\n')

    def command(self) -> list[str]:
        python, _, _, *flags = super().command()
        return [python, "-c", self.before + RUN, *flags]

    def mount(self) -> None:
        self.local_dir.parent.mkdir(mode=0o700)

    def wait_log(self, text: str, count: int = 1) -> None:
        end = time.monotonic() + 60
        while self.log.count(text) < count:
            assert time.monotonic() < end, self.log
            assert self.running, self.log
            time.sleep(0.05)

    def ended(self) -> int:
        assert self.process is not None
        code = self.process.wait(STOP_SECONDS)
        self.reader.join(5)
        return code


def test_what_was_changed_meanwhile_stays_changed(tmp_path: Path) -> None:
    with Returning(tmp_path) as daemon:
        daemon.write('ram_budget = "4MB"\nlocal_budget = "8MB"\nttl_days = 3\n')
        daemon.hang_up()
        daemon.wait_log("reloaded: changed=")
        daemon.mount()
        daemon.wait_log("sidecar ready", 2)
        budgets = {tier.tier: tier.budget_bytes for tier in daemon.stat().tiers}
        assert budgets == {pb.TIER_RAM: 4_000_000, pb.TIER_LOCAL: 8_000_000}
        daemon.hang_up()
        daemon.wait_log("reloaded: changed=none needs_restart=none")


@pytest.mark.parametrize("moment", SIGNALLED)
def test_a_stop_meanwhile_ends_it_in_order(tmp_path: Path, moment: str) -> None:
    script = SIGNALLED[moment].replace("NUMBER", str(int(signal.SIGTERM)))
    with Returning(tmp_path, script) as daemon:
        daemon.mount()
        assert daemon.ended() == 0
        assert daemon.said("sidecar stopped: everything is on disk")


@pytest.mark.parametrize("moment", SIGNALLED)
def test_a_reload_meanwhile_is_done(tmp_path: Path, moment: str) -> None:
    script = SIGNALLED[moment].replace("NUMBER", str(int(signal.SIGHUP)))
    with Returning(tmp_path, script) as daemon:
        daemon.mount()
        daemon.wait_log("reloaded: ")
        daemon.wait_log("sidecar ready", 2)
        assert daemon.stop() == 0


def test_a_store_that_could_not_be_closed_is_not_opened_again(tmp_path: Path) -> None:
    with Returning(tmp_path, HANGS) as daemon:
        daemon.mount()
        assert daemon.ended() == 9
        assert daemon.said("cannot be opened again in this process: a disk hangs") == 1
        assert daemon.said("sidecar ready") == 1


def test_the_time_between_tries_grows_until_a_tier_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(openings, "can_be_opened", lambda one: True)
    one = AbsentTier(TierKind.LOCAL, Path("/x"), MIB, "why", "cure")
    other = AbsentTier(TierKind.RAM, Path("/y"), MIB, "why", "cure")

    async def rounds() -> None:
        opened = Openings()
        pool: Any = None  # the loop's own
        for left_out in [(one, other)] * 4 + [(one,)] * 2:
            store: Any = SimpleNamespace(left_out=left_out)
            await opened.wait_for_one(store, pool)

    asyncio.run(rounds())
    assert waited == [1.0, 2.0, 5.0, 15.0, 1.0, 2.0]
