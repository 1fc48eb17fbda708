"""A store on this machine's RAM and disk, with blocks of one size."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from measure.store import samples
from ollama_tiering.errors import UsageError
from ollama_tiering.store import (
    BlockKey,
    BlockOffer,
    FsTier,
    LeasedBlock,
    Namespace,
    Outcome,
    SegmentShape,
    Tier,
    TieredStore,
    TierKind,
    crc32c,
    damaged,
    encode_block,
    plan_block,
    prefix_chain,
    read_meta,
    tokens_to_bytes,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.system.files import fd_reader, fill
from ollama_tiering.system.filesystems import in_memory

ROWS: Final = 64
HEADS, HEAD_DIM = 8, 128
LAYER_BYTES: Final = 2 * ROWS * HEADS * HEAD_DIM * 2  # K and V, f16
_HEADROOM_BYTES: Final = 64 << 20
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class RandomBlocks:
    """One sequence of random blocks: 256 KiB for each of `layers`."""

    ns: Namespace
    keys: list[BlockKey]
    tokens: bytes
    layers: int

    @classmethod
    def of(cls, block_bytes: int, total_bytes: int) -> RandomBlocks:
        layers = max(1, block_bytes // LAYER_BYTES)
        count = max(2, total_bytes // (layers * LAYER_BYTES))
        name = f"bench-{layers}"
        ns = samples.namespace(
            name, block_tokens=ROWS, layers=layers, kv_heads=HEADS, head_dim=HEAD_DIM
        )
        tokens = tokens_to_bytes(range(count * ROWS))
        return cls(ns, prefix_chain(ns.digest(), tokens, ROWS), tokens, layers)

    def files(self) -> Iterator[tuple[BlockOffer, bytes]]:
        shapes = [
            SegmentShape(0, layer, kind, "f16", HEADS * HEAD_DIM * 2)
            for layer in range(self.layers)
            for kind in (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
        ]
        rng = np.random.default_rng(0)
        for index, key in enumerate(self.keys):
            parent: bytes = self.keys[index - 1] if index else self.ns.digest()
            plan = plan_block(
                namespace=self.ns.digest(),
                parent=parent,
                tokens=self.tokens[4 * ROWS * index : 4 * ROWS * (index + 1)],
                first_position=index * ROWS,
                shapes=shapes,
            )
            data = encode_block(plan, [rng.bytes(LAYER_BYTES // 2) for _ in shapes])
            yield BlockOffer(key, parent, len(data)), data


@contextlib.contextmanager
def bench_directories(disk: Path, total_bytes: int) -> Iterator[tuple[Path, Path, Path, int]]:
    """(RAM tier, local tier below `disk`, a file beside that one, budget of each tier in bytes) for
    so many bytes of blocks. They are removed at the end. UsageError where memory is too small.
    """
    budget_bytes = total_bytes + total_bytes // 4 + _HEADROOM_BYTES
    memory = Path("/dev/shm")
    if not memory.is_dir() or not in_memory(memory):
        raise UsageError("/dev/shm is no tmpfs: there is no RAM tier to measure")
    room = shutil.disk_usage(memory).free
    if room < budget_bytes:
        raise UsageError(
            f"/dev/shm has {room >> 20} MiB, {budget_bytes >> 20} MiB are needed",
            hint="use a smaller --mb",
        )
    with contextlib.ExitStack() as left:
        ram_dir = Path(tempfile.mkdtemp(dir=memory, prefix="tiering-bench-"))
        left.callback(shutil.rmtree, ram_dir, ignore_errors=True)
        local_dir = Path(tempfile.mkdtemp(dir=disk, prefix="tiering-bench-"))
        left.callback(shutil.rmtree, local_dir, ignore_errors=True)
        # Beside the tier, not in it: all that lies in there counts against its budget.
        other_file = local_dir.with_name(local_dir.name + "-sequential")
        left.callback(other_file.unlink, missing_ok=True)
        yield ram_dir, local_dir, other_file, budget_bytes


class StoreRig:
    """RAM tier on tmpfs over a local tier below `disk`; both are removed at the end."""

    def __init__(
        self,
        disk: Path,
        total_bytes: int,
        *,
        background: bool = False,
        remote: Tier | None = None,
    ) -> None:
        self._background = background
        self._remote = remote
        self._left = contextlib.ExitStack()
        made = self._left.enter_context(bench_directories(disk, total_bytes))
        self.ram_dir, self.local_dir, self.other_file, self._budget_bytes = made
        self.open()

    def open(self) -> None:
        tiers: list[tuple[Tier, int]] = [
            (FsTier(TierKind.RAM, self.ram_dir), self._budget_bytes),
            (FsTier(TierKind.LOCAL, self.local_dir), self._budget_bytes),
        ]
        if self._remote is not None:
            tiers.append((self._remote, 2 * self._budget_bytes))
        index_path = self.local_dir / "index.sqlite"
        self.store = TieredStore(
            tiers, index_path=index_path, background=self._background, measure=False
        )

    def reboot(self) -> None:
        """Empties the RAM tier; the disk stays."""
        self.store.close()
        shutil.rmtree(self.ram_dir)
        self.ram_dir.mkdir(mode=0o700)
        self.open()

    def put(self, blocks: RandomBlocks, files: Sequence[tuple[BlockOffer, bytes]]) -> None:
        """As a client on this host does: reserve, write the file, commit."""
        session = self.store.open_session(blocks.ns.digest(), blocks.ns.fields(), ROWS)
        for offer, data in files:
            (answer,) = session.reserve([offer])
            if answer.outcome is not Outcome.RESERVED or answer.path is None:
                raise UsageError(f"the store has no room: {answer.outcome.name.lower()}")
            with answer.path.open("r+b", buffering=0) as file:
                file.write(data)
            (result,) = session.commit([answer.reservation_id])
            if not result.stored:
                raise UsageError(f"the store refused a block: {result.reason}")
        self.store.close_session(session)

    def block_files(self, directory: Path) -> list[Path]:
        return sorted(directory.rglob("*.kvb"))

    def close(self) -> None:
        self.store.close()
        self._left.close()


class OpenRamBlock:
    """A block of the RAM tier as the Go client has it (overlay/kvtier/file_linux.go): open and not
    mapped, its header read and checked. The caller closes it.
    """

    def __init__(self, block: LeasedBlock) -> None:
        self._fd = os.open(str(block.path), _FLAGS)
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size != block.file_bytes:
                raise RuntimeError(f"{block.path} is not {block.file_bytes} bytes of a block")
            self.meta = read_meta(fd_reader(self._fd), block.file_bytes)
        except BaseException:
            os.close(self._fd)
            raise

    def read_into(self, rows: memoryview, *, check: bool) -> None:
        """All segments, each read once into its place in `rows`, and with `check` compared there
        with its checksum, as scatter_linux.go and Block.ReadSegment do. CorruptBlock.
        """
        at = 0
        for segment in self.meta.segments:
            part = rows[at : at + segment.stored_bytes]
            fill(self._fd, segment.file_offset, part)
            if check and crc32c(part) != segment.crc32c:
                raise damaged(segment)
            at += segment.stored_bytes

    @property
    def rows_bytes(self) -> int:
        return sum(segment.stored_bytes for segment in self.meta.segments)

    def close(self) -> None:
        os.close(self._fd)
