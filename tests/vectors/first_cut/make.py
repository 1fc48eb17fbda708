"""Writes store.tar.gz: the tier directories that the first cut of the sidecar left behind.

Run once, with the code of that commit and not with today's (75e5155f8d76, 2026-11-21: block format
1, index version 1), and not again: what an old version wrote cannot be improved afterwards.

    git worktree add --detach /tmp/first-cut 75e5155f8d761196b7e2637929f417efa7157729
    PYTHONHASHSEED=0 PYTHONPATH=/tmp/first-cut python tests/vectors/first_cut/make.py

In it: `ram/` and `local/` with index.sqlite and namespace.json; two conversations that share two
blocks, one of them with a tail block, one with an image; a quarantined block in each directory;
and blocks.json, what lies where, by tokens, key and SHA-256 of the file.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import tarfile
import tempfile
from pathlib import Path

from measure.store import samples
from ollama_tiering.store.block.key import BlockExtra
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import LOCK_NAME, FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME

HERE = Path(__file__).resolve().parent
BUDGET_BYTES = 1 << 20
WRITTEN = 1_763_700_000.0  # Unix seconds
NS = samples.namespace("first-cut")
IMAGE = BlockExtra(5, hashlib.sha256(b"an image").digest())
CONVERSATIONS: dict[str, tuple[list[int], list[BlockExtra]]] = {
    "with a tail": ([*range(8), 20, 21], []),
    "on the same start": ([*range(8), 30, 31, 32, 33], []),
    "with an image": ([*range(40, 48)], [IMAGE]),
}
DAMAGED = [90, 91, 92]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        seconds = itertools.count()
        store = TieredStore(
            [
                (FsTier(TierKind.RAM, root / "ram"), BUDGET_BYTES),
                (FsTier(TierKind.LOCAL, root / "local"), BUDGET_BYTES),
            ],
            index_path=root / "local" / INDEX_NAME,
            background=False,
            measure=False,
            wall_clock=lambda: WRITTEN + next(seconds),
        )
        written = [
            line
            for name, (tokens, extras) in CONVERSATIONS.items()
            for line in put(store, name, tokens, extras)
        ]
        put(store, "damaged", DAMAGED, [])
        store.run_pending()
        (damaged,) = samples.sequence(NS, DAMAGED)
        for path in root.rglob(f"{damaged.key.hex()}.kvb"):
            flip(path)
        assert store.report_corrupt(NS.digest(), damaged.key)
        store.close()
        manifest = {"namespace": NS.digest().hex(), "blocks": written}
        (root / "blocks.json").write_text(json.dumps(manifest, indent=1) + "\n")
        (HERE / "store.tar.gz").write_bytes(packed(root))


def put(
    store: TieredStore, name: str, tokens: list[int], extras: list[BlockExtra]
) -> list[dict[str, object]]:
    blocks = samples.sequence(NS, tokens, extras)
    lines: list[dict[str, object]] = []
    with store.open_session(NS.digest(), NS.fields(), int(NS.block_tokens)) as session:
        answers = session.reserve([block.offer for block in blocks])
        for index, (block, reserved) in enumerate(zip(blocks, answers, strict=True)):
            if reserved.path is not None:
                reserved.path.write_bytes(block.data)
                (result,) = session.commit([reserved.reservation_id])
                assert result.stored, result.reason
            lines.append(
                {
                    "conversation": name,
                    "tokens": tokens[index * 4 : index * 4 + block.rows],
                    "key": block.key.hex(),
                    "sha256": hashlib.sha256(block.data).hexdigest(),
                }
            )
    return lines


def flip(path: Path) -> None:
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[4100] ^= 1
    path.write_bytes(content)
    path.chmod(0o400)


def packed(root: Path) -> bytes:
    """The same bytes whoever packs them, and when."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            info = tarfile.TarInfo(path.relative_to(root).as_posix())
            info.mode = path.stat().st_mode & 0o777
            info.mtime = int(WRITTEN)
            if path.is_dir():
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                # The lock names the process that held it: another one at every run.
                content = b"4711\n" if path.name == LOCK_NAME else path.read_bytes()
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return gzip.compress(raw.getvalue(), mtime=0)


if __name__ == "__main__":
    main()
