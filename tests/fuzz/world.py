"""A store over real directories, RAM over local over remote, filled with blocks that are known."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ollama_tiering.client.restored import BlockRef, Match, checked
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.block.key import TOKEN_BYTES
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.report import LeasedBlock
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.serving.session import BlockOffer
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME, PINS_NAME
from ollama_tiering.store.tiers.remote import RemoteTier
from ollama_tiering.store.tiers.shared_directory import SharedFsTier
from tests.fuzz.mutations import NAMESPACE, NS, ROWS, Sample, raw_block, sample
from tests.places import TMPFS, short_directory

BUDGET_BYTES = 16 << 20  # and the index's headroom in the local one
BLOCKS = 12  # in a world that is filled


class World:
    """`encodings` of the local and the remote tier; none below `lowest`. A test drives it: without
    background."""

    def __init__(
        self,
        root: Path,
        ram: Path | None,
        *,
        encodings: dict[TierKind, Encoding] | None = None,
        lowest: TierKind = TierKind.REMOTE,
    ) -> None:
        self.root = root
        self.ram = ram or root / "ram"
        self.local = root / "local"
        self.remote = root / "remote"
        self.encodings = encodings or {}
        self.lowest = lowest
        self.remote.mkdir(mode=0o700, exist_ok=True)
        self.blocks: list[Sample] = []
        self.disputed: list[Sample] = []  # refused by a client, and found good by the store
        self.store: TieredStore | None = None

    def open(self) -> TieredStore:
        assert self.store is None
        tiers: list[tuple[Tier, int]] = [
            (FsTier(TierKind.RAM, self.ram), BUDGET_BYTES),
        ]
        if self.lowest >= TierKind.LOCAL:
            tiers.append((FsTier(TierKind.LOCAL, self.local), BUDGET_BYTES))
        if self.lowest is TierKind.REMOTE:
            remote = RemoteTier(
                self.remote,
                lambda: SharedFsTier(self.remote, unfinished_seconds=-1.0),
                deadline_seconds=20.0,
            )
            tiers.append((remote, BUDGET_BYTES))
        self.store = TieredStore(
            tiers,
            index_path=(self.local if len(tiers) > 1 else self.ram) / INDEX_NAME,
            measure=False,
            background=False,
            encodings=TierEncodings(self.encodings),
            staging_seconds=20.0,
        )
        self.store.run_pending()
        return self.store

    def close(self) -> None:
        if self.store is not None:
            self.store.close(drain_seconds=5)
            self.store = None

    def fill(self, number: int, first_token: int = 1000) -> None:
        """Every block a sequence of its own, so that the loss of one is that of no other."""
        store = self.store
        assert store is not None
        session = store.open_session(NAMESPACE, NS.fields(), ROWS)
        for index in range(number):
            data = raw_block(first_token + index * ROWS)
            one = sample(f"block {index}", data, data)
            (answer,) = session.reserve([BlockOffer(one.key, NAMESPACE, len(data))])
            assert answer.path is not None
            answer.path.write_bytes(data)
            (result,) = session.commit([answer.reservation_id])
            assert result.stored, result
            self.blocks.append(one)
        store.close_session(session)
        store.run_pending()
        if self.lowest is TierKind.REMOTE:  # as if the local tier were full
            state = store.state
            for one in self.blocks:
                record = state.tree.get(one.key)
                assert record is not None
                assert store._mover.copy(record, state.levels[1], state.levels[2])
        store.pins.pin(self.blocks[0].key)

    def read(self, one: Sample, *, inline: bool = False) -> bytes | None:
        """What a client gets for the prompt of this block: verified, or None. Damage is reported;
        the store has to find it too.
        """
        store = self.store
        assert store is not None
        rows = len(one.tokens) // TOKEN_BYTES
        found = store.match(one.namespace, [one.key], one.tokens, rows)
        assert sum(block.rows for block in found) <= rows
        if not found or found[0].key != one.key:
            return None
        leased = store.lease(one.namespace, [one.key])
        try:
            if not leased.blocks:
                return None
            data = taken(store, leased.blocks[0], inline=inline)
            return data if data is not None and self.verified(one, data) else None
        finally:
            store.release(leased.lease_id)

    def verified(self, one: Sample, data: bytes) -> bool:
        store = self.store
        assert store is not None
        rows = len(one.tokens) // TOKEN_BYTES
        ref = BlockRef(one.key, 0, rows, rows, "", len(data), 0.0)
        try:
            checked(NS, Match(one.tokens, (ref,)), ref, data)
        except UnsupportedFormat:
            store.report_corrupt(one.namespace, one.key)
            return False
        except CorruptBlock:
            if not store.report_corrupt(one.namespace, one.key):
                self.disputed.append(one)
            return False
        return True

    def quarantined(self) -> int:
        assert self.store is not None
        return sum(tier.stats.quarantined_blocks for tier in self.store.report().tiers)

    def files(self, directory: Path) -> list[Path]:
        return sorted(path for path in directory.rglob("*.kvb") if path.is_file())

    def path_of(self, directory: Path, one: Sample) -> Path:
        name = one.key.hex()
        return directory / "v1" / one.namespace.hex() / name[:2] / f"{name}.kvb"

    @property
    def pins(self) -> Path:
        return self.local / PINS_NAME


def taken(store: TieredStore, block: LeasedBlock, *, inline: bool) -> bytes | None:
    """The file's bytes as a client has them; None when they cannot be read."""
    if inline or block.path is None:
        try:
            return store.read_part(block, 0, block.file_bytes)
        except (OSError, CorruptBlock):
            return None
    return Path(block.path).read_bytes()


def filled(
    root: Path,
    ram: Path | None,
    kind: TierKind,
    encodings: dict[TierKind, Encoding],
    *,
    blocks: int = BLOCKS,
) -> World:
    """Closed. Only this tier has blocks."""
    world = World(root, ram, encodings=encodings, lowest=kind)
    world.open()
    world.fill(blocks)
    world.close()
    for above in (world.ram, world.local)[: kind.value - 1]:
        shutil.rmtree(above / "v1")
    return world


class Snapshot:
    """All files below a directory, to be put back."""

    def __init__(self, *roots: Path) -> None:
        self._roots = roots
        self.files = {
            path: path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file()
        }

    def put_back(self) -> None:
        for root in self._roots:
            for path in [p for p in root.rglob("*") if not p.is_dir()]:
                if path not in self.files:
                    path.unlink()
        for path, data in self.files.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != data:
                path.unlink(missing_ok=True)
                path.write_bytes(data)


def same_rows(data: bytes, raw: bytes) -> bool:
    """But for padding, which nobody reads."""
    meta, wanted = (read_meta(buffer_reader(d), len(d)) for d in (data, raw))
    return meta == wanted and all(
        data[s.file_offset : s.file_offset + s.stored_bytes]
        == raw[s.file_offset : s.file_offset + s.stored_bytes]
        for s in meta.segments
    )


@contextlib.contextmanager
def memory_directory() -> Iterator[Path | None]:
    """On tmpfs, where there is one."""
    if not TMPFS.is_dir():
        yield None
        return
    with short_directory(in_memory=True) as directory:
        yield directory / "ram"


def overwrite(path: Path, data: bytes) -> None:
    """Block files are read-only for everybody but damage."""
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)
