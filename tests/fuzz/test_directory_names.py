"""Whatever was planted in the tiers' directories: the store starts and serves, leaves what is not
its own alone, and follows nothing.
"""

from __future__ import annotations

import os
import random
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.store.serving.session import Claim
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import VERSION_DIRECTORY
from ollama_tiering.store.tiers.names import INDEX_NAME, PINS_NAME, PROBE_PREFIX, WRITTEN_NAME
from ollama_tiering.store.tools.admin import Administration
from tests.fuzz.campaign import Campaign, count, time_limit
from tests.fuzz.mutations import NAMESPACE, NS, ROWS, raw_block, sample
from tests.fuzz.world import Snapshot, World, filled, memory_directory, same_rows

pytestmark = pytest.mark.fault

PLANTED = 8  # at a time
INPUTS = count("names")
# Names the store makes itself: what lies there in their place is its own to replace or remove.
OWN = (PINS_NAME, WRITTEN_NAME, INDEX_NAME, PROBE_PREFIX, ".sidecar-", ".lock", "namespace.json")
OWN_SUFFIXES = (".kvb", ".tmp", ".bad")

OWN_FILES = (
    *(f"{INDEX_NAME}{end}" for end in ("", "-wal", "-shm", "-journal")),
    *(WRITTEN_NAME, f"{WRITTEN_NAME}.tmp", PINS_NAME, ".lock", f"{PROBE_PREFIX}1"),
)

Kind = Callable[[random.Random, bytes, Path], None]


def name(rng: random.Random, world: World) -> bytes:
    """Of a file or directory; never empty, never with a slash."""
    key = rng.choice(world.blocks).key.hex()
    known = (
        *("..x", "...", "-rf", " ", "\n", "\t\x1b[31m", "%s%n", "CON", "v1", "v2", "lost+found"),
        *("é" * 100, "x" * 255, "\u202e", PINS_NAME, WRITTEN_NAME, INDEX_NAME, f"{INDEX_NAME}-wal"),
        *(".lock", "namespace.json", ".nfs0001", f"{PROBE_PREFIX}1", ".sidecar-00", ".sidecar-x"),
        *(
            key,
            key[:2],
            f"{key}.kvb",
            f"{key}.kvb.bad",
            f"{key}.tmp",
            f"{key}.kvb.tmp",
            key.upper(),
        ),
        *(f"{key[:-1]}.kvb", f"{key}0.kvb", NAMESPACE.hex(), f"{PINS_NAME}.bad", "00", "zz"),
        *(bytes(rng.randbytes(32)).hex(), f"{rng.randbytes(32).hex()}.kvb", f".{PINS_NAME}.1"),
    )
    if rng.random() < 0.7:
        return os.fsencode(rng.choice(known))
    noise = bytes(b for b in rng.randbytes(rng.choice((1, 5, 64, 255))) if b not in b"/\0")
    return noise if noise.strip(b".") else b"x"


def place(rng: random.Random, root: Path, world: World) -> Path:
    """A directory of the tier, or one that was not there before."""
    key = rng.choice(world.blocks).key.hex()
    version = root / VERSION_DIRECTORY
    found = (root, version, version / NAMESPACE.hex(), version / NAMESPACE.hex() / key[:2])
    new = version / rng.randbytes(32).hex() / rng.choice(("00", key[:2], "x"))
    where = rng.choice((*found, *found, new))
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    return where


def file(rng: random.Random, at: bytes, outside: Path) -> None:
    Path(os.fsdecode(at)).write_bytes(rng.randbytes(rng.choice((0, 10, 5000))))


def directory(rng: random.Random, at: bytes, outside: Path) -> None:
    Path(os.fsdecode(at)).mkdir(mode=rng.choice((0o700, 0o755)))
    if rng.random() < 0.5:
        (Path(os.fsdecode(at)) / "inner").write_bytes(b"x")


def nested(rng: random.Random, at: bytes, outside: Path) -> None:
    parts = [at, *[b"n" * rng.choice((1, 100))] * rng.choice((3, 30))]
    below = Path(os.fsdecode(parts[0]))
    for part in parts[1:]:
        if len(os.fsencode(below)) > 3500:
            break
        below = below / os.fsdecode(part)
    below.mkdir(mode=0o700, parents=True)


def link_to_file(rng: random.Random, at: bytes, outside: Path) -> None:
    Path(os.fsdecode(at)).symlink_to(outside / "secret")


def link_to_directory(rng: random.Random, at: bytes, outside: Path) -> None:
    Path(os.fsdecode(at)).symlink_to(outside)


def broken_link(rng: random.Random, at: bytes, outside: Path) -> None:
    Path(os.fsdecode(at)).symlink_to(rng.choice(("nowhere", os.fsdecode(at), "/nowhere/x", ".")))


def pipe(rng: random.Random, at: bytes, outside: Path) -> None:
    os.mkfifo(at, 0o600)


def unix_socket(rng: random.Random, at: bytes, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # A socket's path is short: bound by way of the directory's descriptor.
        above = os.open(os.path.dirname(at), os.O_RDONLY)  # noqa: PTH120
        try:
            short = f"/proc/self/fd/{above}/".encode() + os.path.basename(at)  # noqa: PTH119
            if len(short) < 108:
                listener.bind(short)
        finally:
            os.close(above)


KINDS: tuple[Kind, ...] = (
    file,
    directory,
    nested,
    link_to_file,
    link_to_directory,
    broken_link,
    pipe,
    unix_socket,
)


def plant(rng: random.Random, root: Path, world: World, outside: Path) -> tuple[str, bytes]:
    """What was planted, and where. Nothing where something was."""
    kind = rng.choice(KINDS)
    at = os.fsencode(place(rng, root, world)) + b"/" + name(rng, world)
    if not os.path.lexists(at):
        kind(rng, at, outside)
    return kind.__name__, at


@pytest.mark.parametrize("kind", [link_to_file, link_to_directory, directory, pipe])
@pytest.mark.parametrize("name", OWN_FILES)
def test_in_the_place_of_its_own_files_nothing_is_followed_or_waited_for(
    tmp_path: Path, name: str, kind: Kind
) -> None:
    world = filled(tmp_path, None, TierKind.LOCAL, {}, blocks=2)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    before = look(outside)
    (world.local / name).unlink(missing_ok=True)
    kind(random.Random(1), os.fsencode(world.local / name), outside)
    try:
        store = world.open()
    except (ServiceError, OSError):  # said, and not started: whose lock or pins are these?
        assert name in (".lock", PINS_NAME)
    else:
        assert all(world.read(one) for one in world.blocks)
        store.pins.pin(world.blocks[1].key)
        world.close()
    assert look(outside) == before


def ours(at: bytes) -> bool:
    base = os.fsdecode(os.path.basename(at))  # noqa: PTH119
    own_directory = re.fullmatch("[0-9a-f]{2}|[0-9a-f]{64}", base) is not None
    return own_directory or base.startswith((*OWN, f".{PINS_NAME}")) or base.endswith(OWN_SUFFIXES)


def look(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every name below a directory, with its type and content."""
    seen = {}
    for path in [root, *root.rglob("*")]:
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) else b""
        seen[str(path)] = (mode, content)
    return seen


@pytest.fixture
def ram() -> Iterator[Path | None]:
    with memory_directory() as made:
        yield made


@pytest.mark.timeout(time_limit(INPUTS))
@pytest.mark.parametrize("lowest", [TierKind.RAM, TierKind.LOCAL, TierKind.REMOTE])
def test_nothing_planted_in_a_tier_does_harm(
    tmp_path: Path, ram: Path | None, lowest: TierKind
) -> None:
    (tmp_path / "outside").mkdir()
    outside = tmp_path / "outside"
    (outside / "secret").write_bytes(b"secret")
    (outside / "pins.json").write_bytes(b"{}")
    before = look(outside)
    world = filled(tmp_path, ram, lowest, {})
    root = (world.ram, world.local, world.remote)[lowest.value - 1]
    snapshot = Snapshot(world.ram, world.local, world.remote)
    campaign = Campaign(f"names, {lowest.label}", max(1, INPUTS // PLANTED // 3))
    for number in campaign:
        with campaign.input(number) as rng:
            planted = [plant(rng, root, world, outside) for _ in range(PLANTED)]
            here = [at for _, at in planted if os.path.lexists(at)]
            kept = {at: os.lstat(at).st_mode for at in here if not ours(at)}
            world.open()
            assert world.store is not None
            for one in world.blocks:
                data = world.read(one)
                assert data is not None, one.name
                assert same_rows(data, one.raw)
            if rng.random() < 0.5:
                store_through_link(rng, world, root, outside)
            world.store.run_pending()
            admin = Administration(world.store, alone=False)
            admin.listing()
            for _ in admin.verify(repair=True):
                pass
            admin.collect(older_than_seconds=0, models=None, dry_run=False)
            world.close()
            for at, mode in kept.items():
                assert os.lstat(at).st_mode == mode, at
            assert look(outside) == before
            campaign.outcomes.update(kind for kind, _ in planted)
            clear(root)
            snapshot.put_back()
    campaign.report()


def store_through_link(rng: random.Random, world: World, root: Path, outside: Path) -> None:
    """A block whose directory has become a link to elsewhere."""
    data = raw_block(rng.randrange(100_000, 200_000))
    one = sample("new", data, data)
    at = world.path_of(root, one).parent
    if os.path.lexists(at):
        return
    at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    at.symlink_to(outside)
    assert world.store is not None
    session = world.store.open_session(NAMESPACE, NS.fields(), ROWS)
    (answer,) = session.reserve([Claim(one.key, NAMESPACE, len(data))])
    if answer.path is not None:
        answer.path.write_bytes(data)
        session.commit([answer.reservation_id])
    world.store.close_session(session)


def clear(directory: Path) -> None:
    """Everything, without following anything."""
    for entry in list(os.scandir(directory)):
        if entry.is_dir(follow_symlinks=False):
            clear(Path(entry.path))
            Path(entry.path).rmdir()
        else:
            Path(entry.path).unlink()
