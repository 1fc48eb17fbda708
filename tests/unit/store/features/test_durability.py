"""What is safe after a power cut, one promise at a time (tests/fault/test_power_cuts.py: all)."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.blockfile import encode_block, plan_block
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.books.pins import Pin
from ollama_tiering.store.serving.session import BlockOffer, Outcome
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.daily_writes import DailyWrites
from ollama_tiering.store.tiers.description_file import read_description
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.names import PINS_NAME, WRITTEN_NAME
from ollama_tiering.store.tiers.shared_directory import SharedFsTier
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.archive import open_archive
from ollama_tiering.store.tools.chain_to_export import ChainToExport
from ollama_tiering.store.tools.exporting import export_chain
from ollama_tiering.store.tools.importing import check_archive
from ollama_tiering.store.upkeep.pin_file import file_of_pins, load_pins, save_pins
from ollama_tiering.store.values import Selection
from ollama_tiering.system.directories import secure_directory
from tests.fault.disk_model import Choose, Name, Sync, Unname, after_cut
from tests.fault.recorder import Recorder
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, NS, Bench, disk_budget, keys_of

BLOCKS = samples.sequence(NS, range(10))
KEPT: dict[str, Choose] = {  # of what was not synced
    "nothing": lambda op: False,
    "everything": lambda op: True,
    "names": lambda op: isinstance(op, Name | Unname),
}


class Power:
    """`root` is recorded; `states` are what a cut may leave of it, after each operation."""

    def __init__(self, root: Path, after: Path) -> None:
        root.mkdir()
        self.root, self._after = root, after
        self.recorder = Recorder(root)

    def states(self, *, end: bool = False) -> Iterator[tuple[int, Path]]:
        """(operations done, directory). `end`: only with all of them done."""
        ops = list(self.recorder.ops)
        for at in range(len(ops) if end else 0, len(ops) + 1):
            for name, choose in KEPT.items():
                directory = self._after / f"{at} {name}"
                after_cut(ops[:at], self.recorder.kinds, choose).write_to(directory)
                yield at, directory


@pytest.fixture
def power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Power]:
    monkeypatch.setattr("ollama_tiering.store.tiers.directory.in_memory", lambda directory: False)
    (tmp_path / "after").mkdir()
    one = Power(tmp_path / "disk", tmp_path / "after")
    with one.recorder.recording():
        yield one


def local(root: Path) -> FsTier:
    return FsTier(TierKind.LOCAL, root / "tier")


def shared(root: Path) -> SharedFsTier:
    (root / "tier").mkdir(mode=0o700, exist_ok=True)
    return SharedFsTier(root / "tier")


def publish(tier: Tier, index: int = 0, *, durable: bool = True) -> None:
    block = BLOCKS[index]
    temp = tier.create(NAMESPACE, block.key, len(block.data))
    temp.write_at(0, block.data)
    tier.publish(temp, durable=durable)


def blocks_at(root: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (root / "tier").rglob("*.kvb")}


@pytest.mark.parametrize("opened", [local, shared])
def test_a_name_is_never_there_before_its_content(
    power: Power, opened: Callable[[Path], Tier]
) -> None:
    tier = opened(power.root)
    for index in range(2):
        publish(tier, index)
    right = {block.key.hex(): block.data for block in BLOCKS}
    for _, state in power.states():
        assert blocks_at(state).items() <= right.items()


def test_a_block_is_safe_when_it_is_published(power: Power) -> None:
    tier = local(power.root)
    done = []
    for index in range(3):
        publish(tier, index)
        done.append(len(power.recorder.ops))
    for at, state in power.states():
        assert len(blocks_at(state)) >= sum(at >= one for one in done)


def test_a_block_on_a_shared_tier_is_safe_when_it_is_published(power: Power) -> None:
    publish(shared(power.root))
    named = [op for op in power.recorder.ops if isinstance(op, Name) and op.old is not None]
    assert [op.name for op in named] == [f"{BLOCKS[0].key.hex()}.kvb"]
    assert safe(power, named[-1])


def safe(power: Power, name: Name) -> bool:
    """Whether the directory was synced after the name was given."""
    ops = power.recorder.ops
    disk = after_cut(ops, power.recorder.kinds, lambda op: op is not name)
    return disk.nodes[name.directory].names == power.recorder.now.nodes[name.directory].names


def test_names_are_safe_when_they_are_synced_later(power: Power) -> None:
    tier = local(power.root)
    for index in range(3):
        publish(tier, index, durable=False)
    tier.sync_names()
    for _, state in power.states(end=True):
        assert len(blocks_at(state)) == 3


def test_what_a_killed_process_has_named_is_safe_after_a_start(power: Power) -> None:
    tier = local(power.root)
    publish(tier, durable=False)
    tier.close()
    again = local(power.root)
    assert [stored.key for stored in again.scan()] == [BLOCKS[0].key]
    again.sync_names()
    for _, state in power.states(end=True):
        assert len(blocks_at(state)) == 1


def test_nothing_is_synced_in_memory(power: Power, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ollama_tiering.store.tiers.directory.in_memory", lambda directory: True)
    tier = local(power.root)
    publish(tier)  # makes the directories
    done = len(power.recorder.ops)
    tier.describe(NAMESPACE, NS.fields())
    publish(tier)
    publish(tier, durable=False)
    tier.sync_names()
    tier.remove(NAMESPACE, BLOCKS[0].key)
    tier.sync_removals()
    assert list(tier.scan()) == []
    assert not [op for op in power.recorder.ops[done:] if isinstance(op, Sync)]


@pytest.mark.parametrize("kind", [TierKind.RAM, TierKind.LOCAL, TierKind.REMOTE])
def test_a_stored_block_may_be_written_by_nobody(tmp_path: Path, kind: TierKind) -> None:
    tier = shared(tmp_path) if kind is TierKind.REMOTE else FsTier(kind, tmp_path / "tier")
    publish(tier)
    publish(tier, 1, durable=False)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "tier").rglob("*.kvb")]
    assert modes == [0o400, 0o400]


def test_a_new_directory_is_safe(power: Power) -> None:
    secure_directory(power.root / "a" / "b" / "c")
    for _, state in power.states(end=True):
        assert (state / "a" / "b" / "c").is_dir()


def test_a_description_is_whole_or_not_there(power: Power) -> None:
    tier = local(power.root)
    tier.describe(NAMESPACE, NS.fields())
    done = len(power.recorder.ops)
    for at, state in power.states():
        there = [*(state / "tier").rglob("namespace.json")]
        assert bool(there) or at < done
        for _ in there:
            assert read_description(state / "tier", NAMESPACE) == tuple(NS.fields())


def test_an_unfinished_description_goes_at_the_next_start(tmp_path: Path) -> None:
    tier = local(tmp_path)
    tier.describe(NAMESPACE, NS.fields())
    publish(tier)
    left = tmp_path / "tier" / "v1" / NAMESPACE.hex() / ".0a0b0c0d.tmp"
    left.write_bytes(b"{")
    foreign = left.with_name("notes.tmp")  # by no name that the store gives
    foreign.write_bytes(b"mine")
    tier.close()
    again = local(tmp_path)
    assert len(list(again.scan())) == 1
    assert not left.exists()
    assert foreign.exists()
    assert read_description(tmp_path / "tier", NAMESPACE) == tuple(NS.fields())


def test_a_description_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")

    tier = local(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("ollama_tiering.store.tiers.description_file.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            tier.describe(NAMESPACE, NS.fields())
    assert list((tmp_path / "tier" / "v1" / NAMESPACE.hex()).iterdir()) == []
    tier.describe(NAMESPACE, NS.fields())
    assert read_description(tmp_path / "tier", NAMESPACE) == tuple(NS.fields())


def test_the_count_of_the_day_is_never_behind_the_disk(power: Power) -> None:
    daily = DailyWrites(power.root / WRITTEN_NAME, 64 << 20)
    charged = [(0, 0)]
    for _ in range(4):
        assert daily.charge(3 << 20)
        charged.append((len(power.recorder.ops), charged[-1][1] + (3 << 20)))
    for at, state in power.states():
        promised = max(written for done, written in charged if done <= at)
        if (state / WRITTEN_NAME).exists():
            assert json.loads((state / WRITTEN_NAME).read_bytes())["written_bytes"] >= promised
        else:
            assert not promised


def test_what_was_removed_does_not_come_back(power: Power) -> None:
    tiers: list[tuple[Tier, int]] = [(local(power.root), disk_budget(20))]
    bench = Bench(tiers=tiers)
    removed, kept = bench.put(range(10)), bench.put(range(100, 105))
    admin = Administration(bench.store, alone=False)
    gone = admin.remove(Selection(ids=(removed[-1].key.hex(),)), dry_run=False)
    assert gone.blocks == len(removed)
    for _, state in power.states(end=True):
        assert set(blocks_at(state)) == {key.hex() for key in keys_of(kept)}


def test_pins_are_the_old_list_or_the_new_one(power: Power) -> None:
    path = power.root / PINS_NAME
    lists: list[list[Pin]] = [[]]
    done = [0]
    for index in range(3):
        lists.append([*lists[-1], Pin(NAMESPACE, (BLOCKS[index].key,), 1.0)])
        save_pins(path, file_of_pins(lists[-1]))
        done.append(len(power.recorder.ops))
    for at, state in power.states():
        last = sum(at >= one for one in done) - 1
        assert load_pins(state / PINS_NAME) in lists[last : last + 2]


@pytest.mark.parametrize("as_directory", [False, True])
def test_an_archive_is_complete_or_not_there(power: Power, as_directory: bool) -> None:
    bench = Bench()
    blocks = bench.put(range(10))
    admin = Administration(bench.store, alone=False)
    keys = tuple((block.key, len(block.data)) for block in blocks)
    chain = ChainToExport(NAMESPACE, tuple(NS.fields()), keys)
    target = power.root / "chain"
    opened = admin.opened(chain)
    export_chain(chain, opened, target, as_directory=as_directory, progress=lambda _: None)
    done = len(power.recorder.ops)
    for at, state in power.states():
        there = (state / "chain").exists()
        assert there or at < done
        if there:
            with open_archive(state / "chain") as archive:
                assert len(check_archive(archive, lambda _: None).whole_keys) == 2


def test_a_shorter_tail_stays_on_the_disk_until_the_longer_one_is_safe_there() -> None:
    """Until then it is all that a power cut leaves of these rows."""
    disk = FailingSync(TierKind.LOCAL)
    ram = MemoryTier(TierKind.RAM)
    bench = Bench(tiers=[(ram, 1 << 20), (disk, 1 << 20)])
    (short,) = bench.put([1, 2])
    bench.store.run_pending()
    (long,) = bench.put([1, 2, 3])
    assert bench.in_tier(0) == {long.key}
    assert bench.in_tier(1) == {short.key}
    disk.fails = True
    bench.store.run_pending()
    assert bench.in_tier(1) == {short.key, long.key}, "named, and not durable"
    assert bench.state.suspended(bench.state.levels[1])
    disk.fails = False
    bench.tick(120)
    bench.store.run_pending()
    assert bench.in_tier(1) == {long.key}
    assert bench.rows([1, 2]) == 2


class FailingSync(MemoryTier):
    fails = False

    def sync_names(self) -> None:
        if self.fails:
            raise OSError(5, "I/O error")


def test_names_are_synced_every_two_seconds_while_more_are_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(ram=400, local=400)
    synced: list[float] = []
    monkeypatch.setattr(bench.tiers[1][0], "sync_names", lambda: synced.append(bench.now))
    monkeypatch.setattr("ollama_tiering.store.upkeep.mover._BATCH_BLOCKS", 1)
    bench.put(range(0, 200))
    started = bench.now
    for _ in range(40):
        assert bench.store._mover.write_down()
        bench.tick(0.5)
    gaps = [after - before for before, after in zip([started, *synced], synced, strict=False)]
    assert synced
    assert max(gaps) <= 2.5


# --- commit: whose block it is -----------------------------------------------------------------


def of_namespace(header: samples.Namespace, parent: bytes, tokens: Sequence[int]) -> bytes:
    """A block of one namespace that follows a block of another."""
    row_bytes = 8 * 2
    kinds = (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
    plan = plan_block(
        namespace=header.digest(),
        parent=parent,
        tokens=tokens_to_bytes(tokens),
        first_position=BLOCK_TOKENS,
        shapes=[SegmentShape(0, 0, kind, "f16", row_bytes) for kind in kinds],
        created_unix_seconds=1,
    )
    return encode_block(plan, [bytes(length) for _, length in plan.spans])


def test_a_commit_refuses_a_header_of_another_namespace() -> None:
    """Its key follows from its parent's, so nothing else tells."""
    bench = Bench()
    (first,) = bench.put([1, 2, 3, 4])
    other = samples.namespace("other", layers=1)
    mine, foreign = (of_namespace(ns, first.key, [5, 6, 7, 8]) for ns in (NS, other))
    (key,) = {block.key for block in samples.sequence(NS, range(1, 9))[1:]}
    for data, stored in ((foreign, False), (mine, True)):
        (answer,) = bench.session.reserve([BlockOffer(key, first.key, len(data))])
        assert answer.outcome is Outcome.RESERVED
        bench.fill(answer, data)
        (result,) = bench.session.commit([answer.reservation_id])
        assert result.stored is stored
        assert stored or "another namespace" in result.reason
        assert (key in bench.in_tier(0)) is stored


def test_an_inline_block_of_another_namespace_is_refused() -> None:
    bench = Bench()
    (first,) = bench.put([1, 2, 3, 4])
    other = samples.namespace("other", layers=1)
    foreign = of_namespace(other, first.key, [5, 6, 7, 8])
    (key,) = {block.key for block in samples.sequence(NS, range(1, 9))[1:]}
    result = bench.session.put_inline(key, foreign, last=True)
    assert result is not None
    assert not result.stored
    assert "another namespace" in result.reason
    assert bench.in_tier(0) == {first.key}
