"""One bit flipped in any file of the store: found before a byte is used, a miss, never an error.

A thousand flips here, ten thousand with `make flips`. Blocks lie in one tier only, so that another
copy cannot hide what was not found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import BAD_SUFFIX
from tests.fuzz.campaign import FLIPS, Campaign, time_limit
from tests.fuzz.mutations import PREAMBLE_BYTES, Sample
from tests.fuzz.world import BLOCKS, Snapshot, filled, memory_directory, same_rows

pytestmark = pytest.mark.fault

ZSTD = {TierKind.LOCAL: Encoding.ZSTD}
# Tier, what its files hold, and the share of the flips.
TIERS = {
    "ram": (TierKind.RAM, {}, 0.25),
    "local raw": (TierKind.LOCAL, {}, 0.25),
    "local zstd": (TierKind.LOCAL, ZSTD, 0.2),
    "remote raw": (TierKind.REMOTE, {}, 0.1),
    "remote zstd": (TierKind.REMOTE, {TierKind.REMOTE: Encoding.ZSTD}, 0.1),
}
OTHERS_SHARE = 0.1


def flip(rng: random.Random, path: Path) -> int:
    """Where. Half of them in the first bytes, which say what the rest means."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 180))
    data[at] ^= 1 << rng.randrange(8)
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("r+b") as file:  # in place: who has it open or mapped sees it
        file.seek(at)
        file.write(data[at : at + 1])
    path.chmod(mode)
    return at


def used(data: bytes, at: int) -> bool:
    """Whether a byte of a block file means anything; the rest is padding."""
    meta = read_meta(buffer_reader(data), len(data))
    header_bytes = int.from_bytes(data[12:16], "little")
    return at < PREAMBLE_BYTES + header_bytes or any(
        s.file_offset <= at < s.file_offset + s.stored_bytes for s in meta.segments
    )


@pytest.fixture
def ram() -> Iterator[Path | None]:
    with memory_directory() as directory:
        yield directory


@pytest.mark.timeout(time_limit(FLIPS))
@pytest.mark.parametrize("tier", TIERS)
def test_a_flipped_bit_of_a_block_is_found_before_it_is_used(
    tmp_path: Path, ram: Path | None, tier: str
) -> None:
    kind, encodings, share = TIERS[tier]
    world = filled(tmp_path, ram, kind, encodings)
    directory = (world.ram, world.local, world.remote)[kind.value - 1]
    snapshot = Snapshot(world.ram, world.local, world.remote)
    campaign = Campaign(f"flips, {tier}", round(FLIPS * share / (BLOCKS - 2)))
    for number in campaign:
        with campaign.input(number) as rng:
            chosen = rng.sample(world.blocks, BLOCKS - 2)
            while_open = rng.random() < 0.5
            if while_open:
                world.open()
            damaged: dict[Sample, bool] = {}
            for one in chosen:
                path = world.path_of(directory, one)
                damaged[one] = used(snapshot.files[path], flip(rng, path))
            if not while_open:
                world.open()
            assert world.store is not None
            for one in world.blocks:
                data = world.read(one, inline=rng.random() < 0.5)
                bad = world.path_of(directory, one)
                bad = bad.with_name(bad.name + BAD_SUFFIX)
                if damaged.get(one):
                    assert data is None, one.name
                    assert bad.exists(), one.name
                else:
                    assert data is not None, one.name
                    assert same_rows(data, one.raw)
                    assert not bad.exists()
                assert world.read(one) == data  # the same answer again
                if one in damaged:
                    where = "used" if damaged[one] else "padding"
                    campaign.outcomes[f"{where}, {'open' if while_open else 'closed'}"] += 1
            assert not world.disputed
            quarantined = world.quarantined()
            bad_files = len(list(directory.rglob(f"*{BAD_SUFFIX}")))
            assert quarantined == bad_files == sum(damaged.values())
            assert world.store.report().counters.misses.get("corrupt", 0) == quarantined
            world.store.run_pending()
            world.close()
            snapshot.put_back()
    campaign.report()


@pytest.mark.timeout(time_limit(FLIPS))
def test_a_flipped_bit_of_any_other_file_costs_no_block(tmp_path: Path, ram: Path | None) -> None:
    world = filled(tmp_path, ram, TierKind.LOCAL, {})
    world.open()
    world.close()
    half_written = world.path_of(world.local, world.blocks[0])
    half_written = half_written.with_name(f"{half_written.stem}.0a1b2c3d.tmp")
    half_written.write_bytes(world.blocks[0].raw[:9000])
    snapshot = Snapshot(world.ram, world.local)
    others = [path for path in snapshot.files if path.suffix != ".kvb" and path.stat().st_size]
    names = {path.name for path in others}
    assert {"index.sqlite", "pins.json", "written-today.json", "namespace.json"} <= names
    campaign = Campaign("flips, other files", round(FLIPS * OTHERS_SHARE))
    for number in campaign:
        with campaign.input(number) as rng:
            path = world.local / "index.sqlite" if rng.random() < 0.6 else rng.choice(others)
            while_open = rng.random() < 0.3
            if while_open:
                world.open()
            if path.exists():
                flip(rng, path)
            if not while_open:
                world.open()
            assert world.store is not None
            for one in rng.sample(world.blocks, BLOCKS):
                data = world.read(one)
                assert data is None or same_rows(data, one.raw)
            world.store.run_pending()
            world.store.flush_index()
            for one in world.blocks:  # files are the truth: what the index said wrong is put right
                data = world.read(one)
                assert data is not None, one.name
                assert same_rows(data, one.raw)
            world.close()
            assert not list(tmp_path.rglob(f"*.kvb{BAD_SUFFIX}"))
            snapshot.put_back()
            name = "a .tmp" if path.suffix == ".tmp" else path.name
            campaign.outcomes[f"{name}, {'open' if while_open else 'closed'}"] += 1
    campaign.report()
