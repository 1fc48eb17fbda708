"""Files that vanished or broke behind the store's back: one prompt finds and stores all of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.blockfile import read_meta, verify_payload
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import suspects
from ollama_tiering.store.errors import CorruptBlock
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.upkeep import chain_check
from tests.unit.store.remote_bench import RemoteBench
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, Bench, disk_budget, path_of

COUNT = 10
TOKENS = range(COUNT * BLOCK_TOKENS)
Harm = Callable[[Path], None]


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    _write(path, b"")


def cut(path: Path) -> None:
    _write(path, path.read_bytes()[:-4096])


def cut_in_its_header(path: Path) -> None:
    _write(path, path.read_bytes()[:100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    _write(path, bytes(data))


def _write(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)


WHICH = {
    "first": [0],
    "last": [COUNT - 1],
    "every second": list(range(0, COUNT, 2)),
    "every": list(range(COUNT)),
    "the second half": list(range(COUNT // 2, COUNT)),
}


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    opened: list[Bench] = []
    yield opened
    for bench in opened:
        bench.store.close(drain_seconds=0)


def on_disks(tmp_path: Path, *kinds: TierKind) -> Bench:
    tiers: list[tuple[Tier, int]] = [
        (FsTier(kind, tmp_path / kind.label), disk_budget(3 * COUNT)) for kind in kinds
    ]
    return Bench(tiers=tiers)


def ask(bench: Bench, made: Sequence[samples.SampleBlock]) -> int:
    """As an engine does: asks, reads and checks what it gets, computes and stores the rest. How
    many blocks it could use.
    """
    matched = bench.match(TOKENS)
    leased = bench.store.lease(NAMESPACE, [block.key for block in matched])
    used = 0
    for block in leased.blocks:
        if not _sound(bench, block.key, block.file_bytes):
            bench.store.report_corrupt(NAMESPACE, block.key)
            break
        used += 1
    bench.store.release(leased.lease_id)
    for result in bench.try_put(made[used:]):
        assert result.stored, result
    return used


def _sound(bench: Bench, key: BlockKey, file_bytes: int) -> bool:
    """The nearest copy, as a client reads it."""
    for tier, _ in bench.tiers:
        if tier.is_shared or not tier.exists(NAMESPACE, key):
            continue
        with tier.open(NAMESPACE, key) as block:
            try:
                assert block.file_bytes == file_bytes
                verify_payload(read_meta(block.read_at, block.file_bytes), block.read_at)
            except (CorruptBlock, AssertionError):
                return False
            return True
    return False


CASES = [
    pytest.param(harm, kinds, background, id=f"{harm.__name__}-{len(kinds)}-{background}")
    for harm in (remove, empty, cut, cut_in_its_header, flip)
    for kinds in ((TierKind.RAM,), (TierKind.LOCAL,), (TierKind.RAM, TierKind.LOCAL))
    for background in (False, True)
    if harm in (remove, flip) or (len(kinds) == 2 and not background)
]


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize(("harm", "kinds", "background"), CASES)
def test_one_prompt_stores_anew_all_that_was_lost(
    tmp_path: Path,
    benches: list[Bench],
    kinds: tuple[TierKind, ...],
    harm: Harm,
    which: str,
    background: bool,
) -> None:
    bench = on_disks(tmp_path, *kinds)
    benches.append(bench)
    made = bench.put(TOKENS)
    bench.store.run_pending()
    for tier, _ in bench.tiers:
        for index in WHICH[which]:
            harm(path_of(tier, made[index].key))
    first = WHICH[which][0]
    if background:  # what comes after the first is looked at before the engine has computed it
        put = bench.try_put
        bench.try_put = lambda blocks: (bench.store.run_pending(), put(blocks))[1]  # type: ignore[method-assign]
    assert ask(bench, made) == first
    assert ask(bench, made) == COUNT
    bench.store.run_pending()
    assert not bench.state.suspects.waiting
    for tier, _ in bench.tiers:
        assert all(tier.exists(NAMESPACE, block.key) for block in made)
    assert ask(bench, made) == COUNT


@pytest.mark.parametrize("which", WHICH)
def test_what_only_the_disk_lost_is_written_there_again(
    tmp_path: Path, benches: list[Bench], which: str
) -> None:
    bench = on_disks(tmp_path, TierKind.RAM, TierKind.LOCAL)
    benches.append(bench)
    made = bench.put(TOKENS)
    bench.store.run_pending()
    local = bench.tiers[1][0]
    for index in WHICH[which]:
        remove(path_of(local, made[index].key))
    assert {one.outcome for one in bench.reserve(made)} == {Outcome.PRESENT}
    bench.store.run_pending()
    assert all(local.exists(NAMESPACE, block.key) for block in made)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("harm", [remove, empty, cut, flip])
def test_what_the_remote_tier_lost_is_stored_anew(
    tmp_path: Path, benches: list[Bench], harm: Harm, which: str
) -> None:
    bench = RemoteBench(tmp_path / "remote", ram=3 * COUNT, local=None, remote=9 * COUNT)
    benches.append(bench)
    made = bench.put(TOKENS)
    bench.store.run_pending()
    bench.forget_above()
    for index in WHICH[which]:
        harm(next((tmp_path / "remote").rglob(f"{made[index].key.hex()}.kvb")))
    assert ask(bench, made) == WHICH[which][0]
    assert ask(bench, made) == COUNT
    bench.store.run_pending()
    assert not bench.state.suspects.waiting
    assert not bench.state.suspects.shared
    assert len(list((tmp_path / "remote").rglob("*.kvb"))) == COUNT


def test_a_branch_of_a_lost_block_is_looked_at_too(tmp_path: Path, benches: list[Bench]) -> None:
    bench = on_disks(tmp_path, TierKind.LOCAL)
    benches.append(bench)
    made = bench.put(range(4 * BLOCK_TOKENS))
    other = [*range(2 * BLOCK_TOKENS), *range(900, 900 + 2 * BLOCK_TOKENS)]
    branch = bench.put(other)
    local = bench.tiers[0][0]
    for block in (made[1], branch[3]):
        remove(path_of(local, block.key))
    bench.store.lease(NAMESPACE, [block.key for block in made])
    bench.store.run_pending()
    assert bench.state.tree.get(branch[3].key) is None
    assert bench.state.tree.get(branch[2].key) is not None
    assert bench.state.tree.get(made[3].key) is not None


def test_weather_while_it_is_looked_at_forgets_nothing(
    tmp_path: Path, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = on_disks(tmp_path, TierKind.LOCAL)
    benches.append(bench)
    made = bench.put(TOKENS)
    local = bench.tiers[0][0]
    remove(path_of(local, made[0].key))
    bench.store.lease(NAMESPACE, [block.key for block in made])

    def broken(*args: object) -> bool:
        raise OSError(errno.EIO, "made to fail")

    monkeypatch.setattr(local, "exists", broken)
    bench.store.run_pending()
    answers = bench.reserve(made[1:])
    assert {one.outcome for one in answers} == {Outcome.PRESENT}
    assert all(bench.state.tree.get(block.key) for block in made[1:])


def test_what_waits_to_be_looked_at_is_bounded(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(ram=COUNT)
    benches.append(bench)
    made = bench.put(TOKENS)
    monkeypatch.setattr(suspects, "MOST", 5)
    suspects.came_upon(bench.state, made[0].key, damaged=False)
    chain_check.expand_all(bench.state)
    assert list(bench.state.suspects.waiting) == [block.key for block in made[1:6]]
    bench.store.run_pending()
    assert not bench.state.suspects.waiting


def test_bytes_are_read_only_for_so_long_while_a_writer_waits(
    tmp_path: Path, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = on_disks(tmp_path, TierKind.LOCAL)
    benches.append(bench)
    made = bench.put(TOKENS)
    for block in made:
        flip(path_of(bench.tiers[0][0], block.key))
    monkeypatch.setattr(chain_check, "OFFER_SECONDS", 0.0)
    bench.store.report_corrupt(NAMESPACE, made[0].key)
    outcomes = [one.outcome for one in bench.reserve(made)]
    assert outcomes == [Outcome.RESERVED] + [Outcome.PRESENT] * (COUNT - 1)
    assert len(bench.state.suspects.waiting) == COUNT - 1  # the background reads them
    bench.store.run_pending()
    assert all(bench.state.tree.get(block.key) is None for block in made)


def test_a_writer_does_not_wait_for_a_disk_where_ram_has_the_block(
    tmp_path: Path, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = on_disks(tmp_path, TierKind.RAM, TierKind.LOCAL)
    benches.append(bench)
    made = bench.put(TOKENS)
    bench.store.run_pending()

    def hangs(*args: object) -> bool:
        raise AssertionError("nobody asks the disk")

    with monkeypatch.context() as patch:
        patch.setattr(bench.tiers[1][0], "exists", hangs)
        assert {one.outcome for one in bench.reserve(made)} == {Outcome.PRESENT}
    bench.store.run_pending()
    assert not bench.state.suspects.waiting


def test_a_block_that_is_only_looked_at_again_is_no_suspect(
    tmp_path: Path, benches: list[Bench]
) -> None:
    """What comes after it is looked at if it is then found to be lost."""
    bench = on_disks(tmp_path, TierKind.RAM, TierKind.LOCAL)
    benches.append(bench)
    made = bench.put(TOKENS)
    bench.store.run_pending()
    bench.reserve(made)
    assert list(bench.state.suspects.others) == [block.key for block in made]
    for tier, _ in bench.tiers:
        for block in made:
            remove(path_of(tier, block.key))
    bench.store.lease(NAMESPACE, [block.key for block in made])
    chain_check.expand_all(bench.state)
    assert list(bench.state.suspects.waiting) == [block.key for block in made[1:]]
    bench.store.run_pending()
    assert not bench.state.suspects.others
    assert len(bench.state.tree) == 0


@pytest.mark.parametrize("kind", [TierKind.RAM, TierKind.LOCAL])
@pytest.mark.parametrize("harm", [empty, cut])
def test_a_file_of_another_size_is_neither_given_to_a_client_nor_taken_for_stored(
    tmp_path: Path, benches: list[Bench], kind: TierKind, harm: Harm
) -> None:
    """Nobody reports it: a client that cannot open a file has a miss, and says no more."""
    bench = on_disks(tmp_path, kind)
    benches.append(bench)
    made = bench.put(TOKENS)
    for index in (3, 7):
        harm(path_of(bench.tiers[0][0], made[index].key))
    leased = bench.store.lease(NAMESPACE, [block.key for block in made])
    assert [block.key for block in leased.blocks] == [block.key for block in made[:3]]
    outcomes = [one.outcome for one in bench.reserve(made)]
    wanted = [index for index, one in enumerate(outcomes) if one is Outcome.RESERVED]
    assert wanted == [3, 7]
