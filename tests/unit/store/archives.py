"""Archives that are made, taken apart and spoilt, and the two stores they go between."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ollama_tiering.config import MIB
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.archive import open_archive
from ollama_tiering.store.tools.exporting import export_chain
from ollama_tiering.store.tools.importing import Imported, check_archive, import_blocks
from tests.unit.store.support import Bench

TOKENS = [*range(8), 90, 91]


def nothing(done: int) -> None:
    pass


class Side:
    """A store in one directory, with its administration."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tiers: list[Any] = [(FsTier(TierKind.LOCAL, root / "local"), 64 * MIB)]
        self.bench = Bench(tiers=tiers)
        self.admin = Administration(self.bench.store, alone=True)

    def export(self, chain_id: str, target: Path, *, as_directory: bool = False) -> None:
        chain = self.admin.chain(chain_id)
        export_chain(
            chain, self.admin.opened(chain), target, as_directory=as_directory, progress=nothing
        )

    def take(self, source: Path) -> Imported:
        """What `tiering import` does."""
        with open_archive(source) as archive:
            checked = check_archive(archive, nothing)
            present = self.admin.present(checked)
            with self.admin.sink(archive.manifest) as sink:
                return import_blocks(archive, sink, present, nothing)

    def keys(self) -> set[bytes]:
        return set(self.bench.in_tier(0))

    def close(self) -> None:
        self.bench.store.close()


def members(archive: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = []
        for info in tar:
            file = tar.extractfile(info)
            assert file is not None
            found.append((info, file.read()))
    return found


def pack(parts: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in parts:
            info.size = len(data) if info.type == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def edited(archive: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The archive with another manifest."""
    (head, text), *rest = members(archive)
    document = json.loads(text)
    edit(document)
    return pack([(head, json.dumps(document).encode()), *rest])


def plain(name: str, data: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), data
