"""The store's tools over two real directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measure.store import samples
from ollama_tiering.config import MIB
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.values import ChainLine, Finding, Selection
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, Bench

OTHER = samples.namespace("sha256-" + "ab" * 32, layers=1)
DAY = 86400.0


class Tools:
    """A store in two directories, its tools, and a view of its files."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        tiers: list[Any] = [
            (FsTier(TierKind.RAM, root / "ram"), 64 * MIB),
            (FsTier(TierKind.LOCAL, root / "local"), 64 * MIB),
        ]
        self.bench = Bench(tiers=tiers, index_path=root / "local" / INDEX_NAME, **options)
        self.admin = Administration(self.bench.store, alone=True)

    def put(self, tokens: Any) -> list[samples.SampleBlock]:
        blocks = self.bench.put(tokens)
        self.bench.store.run_pending()
        return blocks

    def put_other(self, tokens: Any) -> list[samples.SampleBlock]:
        with self.bench.store.open_session(OTHER.digest(), OTHER.fields(), BLOCK_TOKENS) as session:
            blocks = samples.sequence(OTHER, tokens)
            for block in blocks:
                assert session.put_inline(block.key, block.data, last=True)
        self.bench.store.run_pending()
        self.bench.tick()
        return blocks

    def chains(self, **selection: Any) -> list[ChainLine]:
        return self.admin.listing(Selection(**selection)).chains

    def file(self, tier: str, key: BlockKey, namespace: bytes = NAMESPACE) -> Path:
        name = key.hex()
        return self.root / tier / "v1" / namespace.hex() / name[:2] / f"{name}.kvb"

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Every file, but those of the database: inode and content."""
        return {
            str(path.relative_to(self.root)): (path.stat().st_ino, path.read_bytes())
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and INDEX_NAME not in path.name
        }

    def flip(self, path: Path, offset: int) -> None:
        path.chmod(0o600)
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    def verify(self, *, repair: bool = False) -> list[Finding]:
        return [f for step in self.admin.verify(repair=repair) for f in step.findings]


def collect(tools: Tools, *, dry_run: bool = False, **options: Any) -> dict[str, tuple[int, int]]:
    wanted = {"older_than_seconds": 0.0, "models": None, **options}
    found = tools.admin.collect(dry_run=dry_run, **wanted)
    return {w.kind: (w.files, w.stored_bytes) for w in found if w.files}
