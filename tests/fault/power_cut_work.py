"""A store at work on a recorded disk, and what it has promised at every moment of it.

Driven by hand and by a seed: no thread but the caller's, so a seed gives the same operations.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from measure.store import samples
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.block.key import BlockKey, tokens_to_bytes
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.archive import open_archive
from ollama_tiering.store.tools.exporting import export_chain
from ollama_tiering.store.tools.importing import check_archive, import_blocks
from ollama_tiering.store.upkeep.index import HEADROOM_BYTES
from ollama_tiering.store.values import Selection
from tests.fault.disk_model import Unname
from tests.fault.recorder import Recorder

NS = samples.namespace("power", layers=1, head_dim=512)  # large enough to be worth encoding
NAMESPACE = NS.digest()
BLOCK_TOKENS = int(NS.block_tokens)
FILE_BYTES = len(samples.sequence(NS, [0])[0].data)
LOCAL, EXPORTS = "local", "exports"
DIRECTORY_BYTES = 4096
BESIDE_BYTES = HEADROOM_BYTES + 32 * DIRECTORY_BYTES
DAY_BYTES = 64 << 20
Tokens = tuple[int, ...]


class SameThread:
    """In place of a pool: the same calls in the same order every time."""

    def __init__(self, *args: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done

    def map(self, call: Callable[..., Any], *of: Iterable[Any]) -> Iterable[Any]:
        return list(map(call, *of))

    def close(self, wait_seconds: float = 0.0) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Setting:
    ram_blocks: int = 400  # 0: no such tier
    local_blocks: int = 400
    encoding: Encoding = Encoding.NONE
    evicts: bool = False  # then what is unlinked is no loss


@dataclass(frozen=True, slots=True)
class Promise:
    """What holds from the `at`-th operation on, until the next one."""

    at: int
    durable: frozenset[BlockKey] = frozenset()  # on the disk, or a longer block that covers it
    removed: frozenset[BlockKey] = frozenset()  # by a person
    pins: tuple[frozenset[BlockKey], ...] = (frozenset(),)  # one of these sets
    exports: frozenset[str] = frozenset()  # names of archives that are complete


@dataclass(slots=True)
class Known:
    """Everything that was ever offered to the store."""

    blocks: dict[BlockKey, samples.SampleBlock] = field(default_factory=dict)
    tokens: dict[BlockKey, Tokens] = field(default_factory=dict)  # of the block's own rows
    chains: dict[Tokens, list[BlockKey]] = field(default_factory=dict)

    def add(self, tokens: Tokens) -> list[samples.SampleBlock]:
        blocks = samples.sequence(NS, tokens)
        for number, block in enumerate(blocks):
            self.blocks[block.key] = block
            self.tokens[block.key] = tokens[number * BLOCK_TOKENS :][: block.rows]
        self.chains[tokens] = [block.key for block in blocks]
        return blocks

    def instead_of(self, key: BlockKey) -> list[BlockKey]:
        """The block and those that hold all of its rows and more."""
        parent, own = self.blocks[key].parent, self.tokens[key]
        return [
            other
            for other, block in self.blocks.items()
            if block.parent == parent and self.tokens[other][: len(own)] == own
        ]


class Work:
    """`root` is recorded; a directory of it is the local tier, RAM is lost with the power."""

    def __init__(self, root: Path, setting: Setting, seed: int) -> None:
        root.mkdir(mode=0o700)
        self.root, self.setting = root, setting
        self.recorder = Recorder(root, leave=(INDEX_NAME,))
        self.rng = random.Random(seed)
        self.known = Known()
        self.promises = [Promise(0)]
        self.indexes: list[tuple[int, dict[str, bytes]]] = []  # after which operation, its files
        self.now = 1000.0
        self._new_token = 0
        self._weights: dict[Callable[[], None], int] = {
            self._put: 4,
            self._go_on: 6,
            self._branch: 2,
            self._settle: 4,
            self._some: 3,
            self._remove: 1,
            self._pin: 1,
            self._unpin: 1,
            self._kill: 1,
            self._stop: 1,
            self._export: 1,
            self._import: 1,
        }
        self._ram = MemoryTier(TierKind.RAM)  # a tmpfs keeps it over a kill, not over a power cut

    def run(self, steps: int) -> None:
        with self.recorder.recording():
            (self.root / EXPORTS).mkdir(mode=0o700)
            below = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(below)
            os.close(below)
            self._open()
            for _ in range(3):
                self._put()
            for _ in range(steps):
                self.rng.choices(list(self._weights), list(self._weights.values()))[0]()
                self.now += self.rng.uniform(0, 1.5)
            self._stop()
            self._close()
            self.recorder.same()

    def open_at(self, root: Path, ram: MemoryTier | None = None) -> TieredStore:
        """The store of this work on other files; after a power cut RAM is empty."""
        setting = self.setting
        tiers: list[tuple[Tier, int]] = []
        if setting.ram_blocks:
            top = ram or MemoryTier(TierKind.RAM)
            tiers.append((top, setting.ram_blocks * FILE_BYTES))
        local_bytes = setting.local_blocks * (FILE_BYTES + DIRECTORY_BYTES) + BESIDE_BYTES
        tiers.append((FsTier(TierKind.LOCAL, root / LOCAL), local_bytes))
        return TieredStore(
            tiers,
            index_path=root / LOCAL / INDEX_NAME,
            background=False,
            measure=False,
            encodings=TierEncodings({TierKind.LOCAL: self.setting.encoding}),
            policy=StorePolicy(daily_write_bytes=DAY_BYTES),
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
        )

    def promise_after(self, operations: int) -> Promise:
        """What had been promised when so many had been done."""
        promise = next(p for p in reversed(self.promises) if p.at <= operations)
        if not self.setting.evicts:
            return promise
        gone = {
            BlockKey(bytes.fromhex(op.name[:64]))
            for op in self.recorder.ops[promise.at : operations]
            if isinstance(op, Unname) and op.name.endswith(".kvb")
        }
        return replace(promise, durable=promise.durable - gone)

    # --- promises ------------------------------------------------------------------------------

    def _promise(self, **changes: Any) -> None:
        self.promises.append(replace(self.promises[-1], at=len(self.recorder.ops), **changes))

    def _durable(self) -> None:
        """Everything that is in the local tier now is safe, and so is all that was before."""
        before = self.promises[-1].durable
        there = frozenset(self._local.lru)
        self._promise(durable=there if self.setting.evicts else before | there)
        self.recorder.same()

    @property
    def _local(self) -> Any:
        return self._store.state.levels[-1]

    # --- steps ---------------------------------------------------------------------------------

    def _put(self) -> None:
        self._new_token += 100
        length = self.rng.randint(1, 3 * BLOCK_TOKENS)
        self._store_chain(tuple(range(self._new_token, self._new_token + length)))

    def _go_on(self) -> None:
        """Longer than before: its last block, if not full, is replaced."""
        self._new_token += 1
        more = range(self._new_token * 1000, self._new_token * 1000 + self.rng.randint(1, 5))
        self._store_chain((*self._chain(), *more))

    def _branch(self) -> None:
        chain = self._chain()
        self._new_token += 1
        self._store_chain((*chain[: self.rng.randint(0, len(chain))], self._new_token * 1000))

    def _store_chain(self, tokens: Tokens) -> None:
        blocks = self.known.add(tokens)
        back = self.promises[-1].removed & {block.key for block in blocks}
        if back:
            self._promise(removed=self.promises[-1].removed - back)
        answers = self._session.reserve([block.offer for block in blocks])
        for block, answer in zip(blocks, answers, strict=True):
            if answer.outcome is Outcome.RESERVED:
                pending = self._session._pending[answer.reservation_id]
                half = self.rng.randrange(len(block.data))
                pending.temp.write_at(0, block.data[:half])
                pending.temp.write_at(half, block.data[half:])
                (result,) = self._session.commit([answer.reservation_id])
                assert result.stored or self.setting.evicts, result
        if not self.setting.ram_blocks:
            self._durable()  # a client that fills a file on the disk is told when it is safe

    def _settle(self) -> None:
        """Until nothing is left to be written down."""
        self._store.run_pending()
        self._durable()
        self._store.flush_index()
        files = {path.name: path.read_bytes() for path in self._directory.glob(INDEX_NAME + "*")}
        self.indexes.append((len(self.recorder.ops), files))

    def _some(self) -> None:
        """A piece of work or two: names are given, and not synced yet."""
        for _ in range(self.rng.randint(1, 2)):
            self._store._mover.step()

    def _remove(self) -> None:
        tokens = self._chain()
        end = self._stored_end(tokens)
        if end is None:
            return
        last, tree = self.promises[-1], self._store.state.tree
        chain = frozenset(self.known.chains[tokens])
        self._promise(durable=self._without(last.durable, chain))
        self._admin().remove(Selection(ids=(end.hex(),)), dry_run=False)
        gone = frozenset(key for key in chain if tree.get(key) is None)
        self._promise(durable=self._without(last.durable, gone), removed=last.removed | gone)

    def _without(
        self, durable: frozenset[BlockKey], gone: frozenset[BlockKey]
    ) -> frozenset[BlockKey]:
        """Less what nothing on the disk has the rows of any more, because these are removed."""
        there = set(self._local.lru) - gone
        ends = {key for key in durable if gone.intersection(self.known.instead_of(key))}
        return durable - {key for key in ends if there.isdisjoint(self.known.instead_of(key))}

    def _pin(self) -> None:
        end = self._stored_end(self._chain())
        if end is not None:
            self._change_pins(lambda: self._admin().pin(end.hex()))

    def _unpin(self) -> None:
        pins = sorted(pin.key for pin in self._store.state.pins)
        if pins:
            key = self.rng.choice(pins)
            if self._store.state.tree.get(key) is not None:
                self._change_pins(lambda: self._admin().unpin(key.hex()))

    def _change_pins(self, change: Callable[[], object]) -> None:
        before = self.promises[-1].pins[-1]
        at = len(self.promises)
        self._promise()
        change()
        after = frozenset(pin.key for pin in self._store.state.pins)
        self.promises[at] = replace(self.promises[at], pins=(before, after))
        self._promise(pins=(after,))

    def _export(self) -> None:
        end = self._stored_end(self._chain())
        if end is None:
            return
        chain = self._admin().chain(end.hex())
        name = f"{len(self.promises)}.{self.rng.choice(['tar', 'dir'])}"
        target = self.root / EXPORTS / name
        opened = self._admin().opened(chain)
        as_directory = name.endswith("dir")
        export_chain(chain, opened, target, as_directory=as_directory, progress=lambda _: None)
        self._promise(exports=self.promises[-1].exports | {name})

    def _import(self) -> None:
        for name in sorted(self.promises[-1].exports)[-1:]:
            with open_archive(self.root / EXPORTS / name) as archive:
                checked = check_archive(archive, lambda _: None)
                back = {block.key for block in archive.manifest.blocks}
                self._promise(removed=self.promises[-1].removed - back)
                if self.setting.evicts:
                    continue
                with self._admin().sink(archive.manifest) as sink:
                    present = self._admin().present(checked)
                    import_blocks(archive, sink, present, lambda _: None)

    def _kill(self) -> None:
        """kill -9 and a start: RAM stays as it is, what was written stays without being synced."""
        self._local.tier.close()  # its lock
        if self._store._index is not None:
            self._store._index.close()
        self._open()

    def _stop(self) -> None:
        self._close()
        self._open()

    def _close(self) -> None:
        self._store.close()
        self._durable()

    # --- help ----------------------------------------------------------------------------------

    @property
    def _directory(self) -> Path:
        return self.root / LOCAL

    def _open(self) -> None:
        self._store = self.open_at(self.root, self._ram)
        self._session = self._store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)

    def _admin(self) -> Administration:
        return Administration(self._store, alone=False)

    def _chain(self) -> Tokens:
        return self.rng.choice(sorted(self.known.chains))

    def _stored_end(self, tokens: Tokens) -> BlockKey | None:
        """The last block of the chain, if it and all before it are stored."""
        keys = self.known.chains[tokens]
        tree = self._store.state.tree
        return keys[-1] if all(tree.get(key) is not None for key in keys) else None

    def rows(self, store: TieredStore, tokens: Tokens) -> int:
        keys = [key for key in self.known.chains[tokens] if not self.known.blocks[key].tail]
        found = store.match(NAMESPACE, keys, tokens_to_bytes(tokens), BLOCK_TOKENS)
        return sum(block.rows for block in found)
