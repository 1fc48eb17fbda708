"""What was removed while the remote tier was away: never served again, and removed there."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.store.block.blockfile import pack_head
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books.graves import Grave
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.authenticity import Authenticity
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME, PINS_NAME, TOMBSTONES_NAME
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.frozen import FrozenRemote
from ollama_tiering.store.upkeep.graveyard import Block
from ollama_tiering.store.upkeep.pin_file import load_pins
from ollama_tiering.store.upkeep.tombstones import load_tombstones, text_of_tombstones
from ollama_tiering.store.values import Removal, Selection
from ollama_tiering.system.directories import UnsafeDirectory
from tests.contract.faulty import Faults, remote_tier
from tests.unit.store.support import NAMESPACE, Bench, keys_of

CREATED = 1_763_700_000.0  # of every sample
LATER = CREATED + 1000
MIB = 1 << 20
TOKENS = range(8)
OTHER_TOKENS = range(100, 108)


class Site(Bench):
    """A local directory above a shared one, and its tools. `restart` is one of the sidecar."""

    def __init__(self, root: Path, name: str = "one", **options: Any) -> None:
        self.root = root
        self.local = root / name
        self.faults = Faults()
        tiers: list[tuple[Tier, int]] = [
            (FsTier(TierKind.LOCAL, self.local), 32 * MIB),
            (remote_tier(root / "remote", self.faults), 32 * MIB),
        ]
        self.now = LATER
        super().__init__(tiers=tiers, index_path=self.local / INDEX_NAME, **options)

    def open(self) -> None:
        self.now = max(self.now, LATER)
        super().open()
        self.admin = Administration(self.store, alone=False)

    def demote_all(self) -> None:
        """Everything has a copy on the shared tier."""
        mover = self.store._remote
        assert mover is not None
        self.look()
        for key in list(self.state.levels[0].lru):
            record = self.state.tree.get(key)
            assert record is not None
            assert mover.copy(record, *self.state.levels)

    def look(self) -> None:
        """What the thread of the shared tier does in its time."""
        mover = self.store._remote
        assert mover is not None
        self.tick(120)
        while mover.recover() and mover.tidy():
            pass
        if mover.recover():
            mover._rescan.run()

    def away(self) -> None:
        self.faults.fail(errno.EIO)
        level = self.state.levels[1]
        with self.state.lock:
            self.state.failed(level, OSError(errno.EIO, "away"))

    def back(self) -> None:
        self.faults.heal()

    def restart(self) -> None:
        """Its own directory stays; the process is another one."""
        self.store.flush_index()
        self.store.close(drain_seconds=0)
        faults = self.faults
        self.tiers = [
            (FsTier(TierKind.LOCAL, self.local), 32 * MIB),
            (remote_tier(self.root / "remote", faults), 32 * MIB),
        ]
        self.open()

    def rm(self, blocks: list[samples.SampleBlock] | None = None, **options: Any) -> Removal:
        ids = (blocks[-1].key.hex(),) if blocks else ()
        return self.admin.remove(Selection(ids=ids), dry_run=False, **options)

    @property
    def tombstones(self) -> dict[Grave, float]:
        return load_tombstones(self.local / TOMBSTONES_NAME)


def files(directory: Path) -> set[BlockKey]:
    return {BlockKey(bytes.fromhex(path.stem)) for path in directory.rglob("*.kvb")}


def path_in(directory: Path, block: samples.SampleBlock) -> Path:
    """Where the block belongs; its directories are there."""
    name = block.key.hex()
    path = directory / "v1" / NAMESPACE.hex() / name[:2] / f"{name}.kvb"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves by itself here."""
    monkeypatch.setattr("ollama_tiering.store.tools.admin.REMOVE_WAIT_SECONDS", 0.0)


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    opened: list[Site] = []
    yield opened
    for one in opened:
        one.faults.heal()
        one.store.close(drain_seconds=0)


@pytest.fixture
def site(tmp_path: Path, sites: list[Site]) -> Site:
    sites.append(Site(tmp_path))
    return sites[0]


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def removed_while_away(site: Site) -> tuple[list[samples.SampleBlock], Removal]:
    blocks = site.put(TOKENS)
    site.put(OTHER_TOKENS)
    site.demote_all()
    site.away()
    return blocks, site.rm(blocks)


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_removed_while_the_tier_was_away_goes_when_it_is_back(
    site: Site, remote: Path, restart: bool
) -> None:
    blocks, done = removed_while_away(site)
    assert done.blocks == done.waiting_blocks == 2
    assert "does not answer, and is tried again in" in done.waiting_for
    assert site.rows(TOKENS) == 0
    assert keys_of(blocks) < files(remote)
    if restart:
        site.restart()
        assert site.rows(TOKENS) == 0
    site.back()
    site.look()
    assert site.rows(TOKENS) == 0
    assert site.rows(OTHER_TOKENS) == 8
    assert files(remote) == keys_of(samples.sequence(samples.namespace(layers=1), OTHER_TOKENS))
    assert site.tombstones == {}


def test_they_are_on_the_disk_before_the_answer(site: Site) -> None:
    blocks, _ = removed_while_away(site)
    path = site.local / TOMBSTONES_NAME
    assert {grave.key for grave in site.tombstones} == keys_of(blocks)
    assert path.stat().st_mode & 0o777 == 0o600
    assert site.state.levels[0].tier.overhead_bytes() >= path.stat().st_blocks * 512


def test_a_block_is_not_adopted_before_it_is_removed(site: Site, remote: Path) -> None:
    """A scan may come first, and removing may fail."""
    blocks, _ = removed_while_away(site)
    site.restart()
    site.faults.fail(errno.EACCES, "remove")
    mover = site.store._remote
    assert mover is not None
    site.tick(120)
    mover._rescan.run()
    assert keys_of(blocks) < files(remote)
    assert not site.in_tier(1) & keys_of(blocks)
    assert site.rows(TOKENS) == 0


def test_stored_anew_while_away_it_is_served_and_the_old_copy_goes(
    site: Site, remote: Path
) -> None:
    blocks, _ = removed_while_away(site)
    site.put(TOKENS)
    assert site.rows(TOKENS) == 8
    site.restart()
    site.back()
    site.look()
    assert not keys_of(blocks) & files(remote)
    assert site.rows(TOKENS) == 8


@pytest.mark.parametrize("crash", [False, True])
def test_stored_anew_and_written_there_again_it_stays(
    site: Site, remote: Path, crash: bool
) -> None:
    blocks, _ = removed_while_away(site)
    site.put(TOKENS)
    site.back()
    mover = site.store._remote
    assert mover is not None
    site.tick(120)
    assert mover.recover()
    # Written there before the old copies were removed.
    mover._books.scanned = True
    mover._low = mover._high = 0.0
    with site.state.lock:
        site.state.levels[1].shared.grant(8 * MIB, site.now, site.now)  # type: ignore[union-attr]
    while mover.demote_one():
        pass
    assert keys_of(blocks) <= files(remote)
    assert site.tombstones == {}  # before it was written there, not some time after
    if crash:
        site.restart()
    site.look()
    assert keys_of(blocks) <= files(remote)
    for key in keys_of(blocks):
        site.state.forget_copy(site.state.levels[0], key)
    assert site.rows(TOKENS) == 8


def test_what_a_neighbour_stored_there_since_stays(site: Site, remote: Path) -> None:
    blocks, _ = removed_while_away(site)
    for path in remote.rglob("*.kvb"):
        if path.stem == blocks[0].key.hex():
            path.unlink()
            path.write_bytes(made_at(blocks[0], int(site.now) + 50))
            path.chmod(0o400)
    site.back()
    site.look()
    assert blocks[0].key in site.in_tier(1)
    assert files(remote) & keys_of(blocks) == {blocks[0].key}
    assert site.tombstones == {}


def made_at(block: samples.SampleBlock, created: int) -> bytes:
    header_bytes = int.from_bytes(block.data[12:16], "little")
    payload_offset = int.from_bytes(block.data[16:24], "little")
    header = pb.BlockHeader.FromString(block.data[32 : 32 + header_bytes])
    header.created_unix_seconds = created
    head = pack_head(header.SerializeToString(deterministic=True), payload_offset)
    return head + block.data[payload_offset:]


def test_what_a_neighbour_stored_since_the_last_look_goes_too(site: Site, remote: Path) -> None:
    """The tier answers, and so far nothing was known to lie there."""
    blocks = site.put(TOKENS)
    site.look()
    for block in blocks:
        path_in(remote, block).write_bytes(block.data)
    site.rm(blocks)
    site.look()
    assert site.rows(TOKENS) == 0
    assert not files(remote)


def test_waiting_for_what_is_in_use_writes_them_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ollama_tiering.store.tools.admin.REMOVE_WAIT_SECONDS", 0.2)
    blocks = site.put(TOKENS)
    site.demote_all()
    site.lease(blocks[:1])
    buried: list[int] = []
    bury = site.store.graveyard.bury
    monkeypatch.setattr(
        site.store.graveyard, "bury", lambda more: (buried.append(len(more)), bury(more))
    )
    done = site.rm(blocks)
    assert (done.blocks, done.kept) == (1, {"in use": 1})
    assert buried == [1]


def test_a_clock_that_is_wrong_does_not_keep_it(site: Site, remote: Path) -> None:
    """Not set yet, it says a time before the block was made."""
    blocks = site.put(TOKENS)
    site.demote_all()
    site.away()
    site.state.wall_clock = lambda: 1000.0
    site.rm(blocks)
    site.back()
    site.look()
    assert not files(remote)


def test_all_takes_what_the_index_knows_of_a_tier_not_seen_yet(site: Site, remote: Path) -> None:
    only_there(site)
    site.restart()
    site.away()
    done = site.rm()
    assert (done.blocks, done.waiting_blocks) == (0, 2)
    site.restart()
    site.back()
    site.look()
    assert not files(remote)
    assert site.rows(TOKENS) == 0


def test_a_dry_run_forgets_nothing_of_a_tier_not_seen_yet(site: Site, remote: Path) -> None:
    blocks = only_there(site)
    site.restart()
    site.away()
    done = site.admin.remove(Selection(), dry_run=True)
    assert done.waiting_blocks == 2
    site.restart()  # which writes the index
    assert site.rm().waiting_blocks == 2
    assert {grave.key for grave in site.tombstones} == keys_of(blocks)
    site.restart()
    site.back()
    site.look()
    assert not files(remote)


def only_there(site: Site) -> list[samples.SampleBlock]:
    """Blocks that only the shared directory has."""
    blocks = site.put(TOKENS)
    site.demote_all()
    for key in keys_of(blocks):
        site.state.forget_copy(site.state.levels[0], key)
        site.tiers[0][0].remove(NAMESPACE, key)
    return blocks


def test_of_a_tier_not_seen_yet_no_more_is_buried_than_can_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only_there(site)
    other = site.put(OTHER_TOKENS)
    site.restart()
    site.away()
    monkeypatch.setattr("ollama_tiering.store.books.graves.MAX_TOMBSTONES", 4)
    done = site.rm()
    assert (done.blocks, done.kept) == (2, {})  # what is in the books comes first
    assert len(site.tombstones) == 3
    assert keys_of(other) < {grave.key for grave in site.tombstones}
    assert "some stay there: blocks=1" in caplog.text
    site.restart()  # the index knows of the one that is left
    site.away()
    monkeypatch.undo()
    site.rm()
    assert len(site.tombstones) == 4


def test_neither_a_long_list_nor_its_text_keeps_look_ups_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ollama_tiering.store.upkeep.graveyard._GRAVES_PER_HOLD", 2)
    free: list[bool] = []

    def look_up() -> None:
        free.append(site.state.lock.acquire(timeout=5))
        if free[-1]:
            site.state.lock.release()

    def elsewhere() -> None:
        thread = threading.Thread(target=look_up)
        thread.start()
        thread.join()

    class Long(dict[Block, float]):
        def items(self) -> Any:
            for number, item in enumerate(super().items()):
                if number % 2 == 0:
                    elsewhere()
                yield item

    def text(tombstones: dict[Grave, float]) -> str:
        elsewhere()
        return text_of_tombstones(tombstones)

    monkeypatch.setattr("ollama_tiering.store.upkeep.graveyard.text_of_tombstones", text)
    blocks = Long({(NAMESPACE, BlockKey(bytes([n]) * 32)): 1.0 for n in range(5)})
    site.store.graveyard.bury(blocks)
    assert free == [True] * 4
    assert len(site.tombstones) == 5


def test_a_tier_that_answers_is_emptied_and_nothing_waits(site: Site, remote: Path) -> None:
    blocks = site.put(TOKENS)
    site.demote_all()
    done = site.rm(blocks)
    assert done.waiting_for == "it is being emptied"
    site.look()
    assert not files(remote)
    assert site.tombstones == {}


def test_a_dry_run_says_what_would_wait_and_writes_nothing(site: Site) -> None:
    blocks = site.put(TOKENS)
    site.demote_all()
    site.away()
    selection = Selection(ids=(blocks[-1].key.hex(),))
    done = site.admin.remove(selection, dry_run=True)
    assert done.waiting_blocks == 2
    assert done.waiting_for
    assert not (site.local / TOMBSTONES_NAME).exists()
    assert site.rows(TOKENS) == 8


def test_another_directory_does_not_end_them(site: Site, tmp_path: Path) -> None:
    """Removed on one remote tier, which then is away: another one is configured meanwhile."""
    removed_while_away(site)
    site.store.close(drain_seconds=0)
    block = samples.sequence(samples.namespace(layers=1), TOKENS)[0]
    other = path_in(tmp_path / "elsewhere", block)
    other.write_bytes(block.data)
    elsewhere = Bench(
        tiers=[
            (FsTier(TierKind.LOCAL, site.local), 32 * MIB),
            (remote_tier(tmp_path / "elsewhere", Faults()), 32 * MIB),
        ]
    )
    mover = elsewhere.store._remote
    assert mover is not None
    while mover.tidy():
        pass
    elsewhere.store.close()
    assert len(site.tombstones) == 2
    assert other.exists()


def test_without_a_sidecar_and_the_tier_out_of_sight(site: Site, remote: Path) -> None:
    blocks = site.put(TOKENS)
    site.demote_all()
    site.store.flush_index()
    site.store.close(drain_seconds=0)
    tool = Bench(
        tiers=[(FsTier(TierKind.LOCAL, site.local), 32 * MIB)],
        index_path=site.local / INDEX_NAME,
        absent_remote=remote,
    )
    tool.now = LATER
    admin = Administration(tool.store, alone=True)
    done = admin.remove(Selection(ids=(blocks[-1].key.hex(),)), dry_run=False)
    assert (done.blocks, done.waiting_blocks) == (2, 2)
    assert "could not be opened" in done.waiting_for
    tool.store.close()
    site.restart()
    site.look()
    assert not files(remote)
    assert site.rows(TOKENS) == 0


def test_without_a_sidecar_it_is_removed_at_once_or_remembered(site: Site, remote: Path) -> None:
    one, two = site.put(TOKENS), site.put(OTHER_TOKENS)
    site.demote_all()
    site.store.close(drain_seconds=0)

    def tool() -> tuple[Bench, FrozenRemote]:
        tier = FrozenRemote(remote, Authenticity(None))
        tier.thaw()
        bench = Bench(tiers=[(FsTier(TierKind.LOCAL, site.local), 32 * MIB), (tier, 32 * MIB)])
        bench.now = LATER
        return bench, tier

    bench, tier = tool()
    admin = Administration(bench.store, alone=True)
    done = admin.remove(Selection(ids=(one[-1].key.hex(),)), dry_run=False)
    assert (done.blocks, done.waiting_blocks) == (2, 0)
    assert files(remote) == keys_of(two)

    def fails(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    tier.remove = fails  # type: ignore[method-assign,assignment]
    done = admin.remove(Selection(ids=(two[-1].key.hex(),)), dry_run=False)
    assert done.waiting_blocks == 2
    bench.store.close()
    bench, _ = tool()
    assert bench.in_tier(1) == set()  # it lies there, and is not shown any more
    bench.store.close()
    site.restart()
    site.look()
    assert not files(remote)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nonsense",
        '{"version": 2, "tiers": []}',
        '{"version": 1, "tiers": [{"directory": 1, "namespaces": {}}]}',
        '{"version": 1, "tiers": [{"directory": "/x", "namespaces": {"ab": {"cd": 1}}}]}',
        '{"version": 1, "tiers": [{"directory": "/x", "namespaces": {"'
        + "ab" * 32
        + '": {"'
        + "cd" * 32
        + '": NaN}}}]}',
        '{"version": 1, "tiers": [{"directory": "/x", "namespaces": []}]}',
    ],
)
def test_a_file_that_is_none_is_said(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / TOMBSTONES_NAME
    path.write_text(text)
    assert load_tombstones(path) == {}
    assert "tombstones unreadable" in caplog.text


def test_a_file_that_is_none_is_kept_aside(site: Site) -> None:
    path = site.local / TOMBSTONES_NAME
    aside = path.with_name(path.name + ".bad")
    path.write_text("not ours to throw away")
    site.restart()
    assert not aside.exists()  # nothing is written, nothing is moved
    blocks, _ = removed_while_away(site)
    assert aside.read_text() == "not ours to throw away"
    assert {grave.key for grave in site.tombstones} == keys_of(blocks)


def test_a_file_that_is_right_is_not_kept_aside(site: Site) -> None:
    removed_while_away(site)
    site.restart()
    site.rm()
    assert len(site.tombstones) == 4
    assert [path.name for path in site.local.glob("tombstones*")] == [TOMBSTONES_NAME]


def test_a_pipe_directory_or_link_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / TOMBSTONES_NAME
    os.mkfifo(path)
    assert load_tombstones(path) == {}
    path.unlink()
    path.mkdir()
    assert load_tombstones(path) == {}
    path.rmdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeDirectory, match="is a link"):
        load_tombstones(path)


def test_only_so_many_can_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ollama_tiering.store.books.graves.MAX_TOMBSTONES", 1)
    blocks, done = removed_while_away(site)
    assert done.blocks == 1
    assert done.kept == {"no more can wait for the remote tier": 1}
    assert site.rows(TOKENS) == 4  # of the one that stays
    assert len(blocks) == 2


def test_a_disk_that_takes_no_tombstone_is_said(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("ollama_tiering.store.upkeep.graveyard.replace_file", full)
    _, done = removed_while_away(site)
    assert "could not be written down, a restart forgets it" in done.waiting_for
    monkeypatch.undo()
    site.tick(120)
    assert site.store.graveyard.flush()
    assert len(json.loads((site.local / TOMBSTONES_NAME).read_text())["tiers"]) == 1


# --- killed in between ----------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_at_the_first_unlink(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process had removed by then: nothing."""
    reached: list[Any] = []

    def killed(namespace: Any, key: Any) -> None:
        reached.append(key)
        raise Killed

    monkeypatch.setattr(site.state.levels[0].tier, "remove", killed)
    return reached


def remove_chain(site: Site, blocks: list[samples.SampleBlock]) -> None:
    site.rm(blocks)


def remove_sequence(site: Site, blocks: list[samples.SampleBlock]) -> None:
    """As an engine does."""
    site.store.remove_seq(NAMESPACE, [block.key for block in blocks])


@pytest.mark.parametrize("remove", [remove_chain, remove_sequence])
@pytest.mark.parametrize("away", [False, True], ids=["there", "away"])
def test_what_was_removed_stays_removed_if_the_process_is_killed_at_the_first_unlink(
    site: Site, monkeypatch: pytest.MonkeyPatch, remove: Any, away: bool
) -> None:
    blocks = site.put(TOKENS)
    site.demote_all()
    if away:
        site.away()
    reached = killed_at_the_first_unlink(site, monkeypatch)
    with pytest.raises(Killed):
        remove(site, blocks)
    assert len(reached) == 1
    # On the disk already: each of them is known as removed before the first file goes.
    assert {grave.key for grave in site.tombstones} == keys_of(blocks)
    for file in site.local.rglob("*.kvb"):
        file.unlink()  # those that the process came to
    site.restart()
    site.back()
    site.look()
    site.look()
    assert site.rows(TOKENS) == 0
    assert files(site.root / "remote") == set()


# --- while the local tier is away -----------------------------------------------------------------


def test_what_was_removed_and_pinned_while_the_local_tier_was_away_stays_so(
    tmp_path: Path, sites: list[Site]
) -> None:
    site = Site(tmp_path)
    sites.append(site)
    gone, kept = site.put(TOKENS), site.put(OTHER_TOKENS)
    site.demote_all()
    site.store.close(drain_seconds=0)
    ram = Bench(
        tiers=[(FsTier(TierKind.RAM, tmp_path / "ram"), 32 * MIB)],
        absent_remote=tmp_path / "remote",
    )
    ram.now = LATER + 1000
    ram.put(TOKENS)
    ram.put(OTHER_TOKENS)
    admin = Administration(ram.store, alone=False)
    done = admin.remove(Selection(ids=(gone[-1].key.hex(),)), dry_run=False)
    assert done.waiting_blocks == len(gone)
    ram.store.pins.pin(kept[-1].key)
    ram.store.close(drain_seconds=0)
    site.now = LATER + 2000
    site.tiers = [
        (FsTier(TierKind.RAM, tmp_path / "ram"), 32 * MIB),
        (FsTier(TierKind.LOCAL, site.local), 32 * MIB),
        (remote_tier(tmp_path / "remote", site.faults), 32 * MIB),
    ]
    site.open()
    assert [pin.key for pin in site.state.pins] == [kept[-1].key]
    site.look()
    assert files(tmp_path / "remote") == keys_of(kept)
    site.store.pins.unpin(kept[-1].key)
    site.store.close(drain_seconds=0)
    # The lists are in one place again: nothing that was undone comes back with the next start.
    assert not (tmp_path / "ram" / TOMBSTONES_NAME).exists()
    assert not (tmp_path / "ram" / PINS_NAME).exists()


def test_lists_from_beside_the_ram_tier_are_soon_in_their_right_place(tmp_path: Path) -> None:
    """A reboot would take them with that tier."""
    ram: list[tuple[Tier, int]] = [(FsTier(TierKind.RAM, tmp_path / "ram"), 32 * MIB)]
    alone = Bench(tiers=ram, absent_remote=tmp_path / "remote")
    kept, gone = alone.put(TOKENS), alone.put(OTHER_TOKENS)
    admin = Administration(alone.store, alone=False)
    admin.remove(Selection(ids=(gone[-1].key.hex(),)), dry_run=False)
    alone.store.pins.pin(kept[-1].key)
    alone.store.close(drain_seconds=0)
    pins, tombstones = tmp_path / "ram" / PINS_NAME, tmp_path / "ram" / TOMBSTONES_NAME
    removed = load_tombstones(tombstones)
    assert len(removed) == len(gone)
    store = TieredStore(
        [
            (FsTier(TierKind.RAM, tmp_path / "ram"), 32 * MIB),
            (FsTier(TierKind.LOCAL, tmp_path / "local"), 32 * MIB),
        ],
        measure=False,
    )
    end = time.monotonic() + 10
    while (pins.exists() or tombstones.exists()) and time.monotonic() < end:
        time.sleep(0.01)
    try:
        assert [pin.key for pin in load_pins(tmp_path / "local" / PINS_NAME)] == [kept[-1].key]
        assert load_tombstones(tmp_path / "local" / TOMBSTONES_NAME) == removed
        assert not pins.exists()
        assert not tombstones.exists()
    finally:
        store.close(drain_seconds=0)
