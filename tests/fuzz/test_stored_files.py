"""Damaged, forged and exchanged files in a store's directories: it starts, serves and moves on.

What is given out is what was put. Only a forger who makes every checksum right again can have
another payload taken for valid, and then under no other prompt than the block's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tools.admin import Administration
from tests.fuzz.campaign import Campaign, count, time_limit
from tests.fuzz.mutations import Mutant, Sample, mutate
from tests.fuzz.world import (
    BUDGET_BYTES,
    Snapshot,
    World,
    filled,
    memory_directory,
    overwrite,
    same_rows,
)

pytestmark = pytest.mark.fault

FILES = 10  # changed at a time, of twelve
INPUTS = count("stored files")
WORLDS = {
    "ram": (TierKind.RAM, {}),
    "local raw": (TierKind.LOCAL, {}),
    "local zstd": (TierKind.LOCAL, {TierKind.LOCAL: Encoding.ZSTD}),
    "remote zstd": (TierKind.REMOTE, {TierKind.REMOTE: Encoding.ZSTD}),
}


@pytest.fixture
def ram() -> Iterator[Path | None]:
    with memory_directory() as directory:
        yield directory


def change(rng: random.Random, directory: Path, world: World) -> dict[Sample, Mutant]:
    """Ten files are replaced by mutants; sometimes two change places, both of them whole."""
    mutants = {}
    for one in rng.sample(world.blocks, FILES):
        path = world.path_of(directory, one)
        data = path.read_bytes()
        on_disk = Sample(one.name, one.key, one.namespace, one.tokens, one.raw, data)
        mutants[one] = mutate(rng, on_disk)
        overwrite(path, mutants[one].data)
    if rng.random() < 0.3:
        one, other = rng.sample(world.blocks, 2)
        paths = [world.path_of(directory, either) for either in (one, other)]
        first, second = (path.read_bytes() for path in paths)
        overwrite(paths[0], second)
        overwrite(paths[1], first)
        for either in (one, other):
            mutants[either] = Mutant(either, b"", "exchanged")
    return mutants


def read_all(world: World, mutants: dict[Sample, Mutant], rng: random.Random) -> list[str]:
    outcomes = []
    for one in rng.sample(world.blocks, len(world.blocks)):
        data = world.read(one, inline=rng.random() < 0.3)
        mutant = mutants.get(one)
        if data is None:
            assert mutant is not None, one.name
            outcomes.append("miss")
        elif same_rows(data, one.raw):
            outcomes.append("what was put")
        else:
            assert mutant is not None, one.name
            assert mutant.trusted, (one.name, mutant.how)
            outcomes.append("forged")
    return outcomes


def administer(world: World, rng: random.Random) -> None:
    assert world.store is not None
    admin = Administration(world.store, alone=False)
    admin.listing()
    for _ in admin.verify(repair=rng.random() < 0.5):
        pass
    admin.collect(older_than_seconds=0, models=None, dry_run=rng.random() < 0.5)


def physical_bytes(directory: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in [directory, *directory.rglob("*")])


@pytest.mark.timeout(time_limit(INPUTS))
@pytest.mark.parametrize("tier", WORLDS)
def test_no_file_in_a_tier_does_harm(tmp_path: Path, ram: Path | None, tier: str) -> None:
    kind, encodings = WORLDS[tier]
    world = filled(tmp_path, ram, kind, encodings)
    roots = (world.ram, world.local, world.remote)
    directory = roots[kind.value - 1]
    snapshot = Snapshot(*roots)
    campaign = Campaign(f"stored files, {tier}", max(1, INPUTS // FILES // len(WORLDS)))
    for number in campaign:
        with campaign.input(number) as rng:
            while_open = rng.random() < 0.3
            if while_open:
                world.open()
            mutants = change(rng, directory, world)
            if rng.random() < 0.5:
                for index in directory.glob("index.sqlite*"):
                    index.unlink()
            if not while_open:
                world.open()
            assert world.store is not None
            campaign.outcomes.update(read_all(world, mutants, rng))
            world.store.run_pending()
            administer(world, rng)
            read_all(world, mutants, rng)
            world.close()
            world.open()
            read_all(world, mutants, rng)
            world.close()
            # The first position is in no key: nobody but a client that has the prompt knows it.
            assert all(mutants[one].trusted for one in world.disputed)
            world.disputed.clear()
            assert all(physical_bytes(root) <= BUDGET_BYTES for root in roots if root.exists())
            snapshot.put_back()
    campaign.report()
