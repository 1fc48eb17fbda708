"""The lock of the state is private to `books/`: nobody else names it, nothing waits under it."""

from __future__ import annotations

import ast
import errno
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import ollama_tiering
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.terms import Terms
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.values import Selection
from tests.contract.faulty import Faults, remote_tier
from tests.unit.store.lock_watch import watch_lock
from tests.unit.store.support import FILE_BYTES, NAMESPACE, Bench, disk_budget

_PACKAGE: Final = Path(ollama_tiering.__file__).parent
_NAMES: Final = ("lock", "_lock")
_READERS: Final = ("getattr", "setattr", "hasattr", "attrgetter", "methodcaller")


def names_of_lock(code: str) -> list[int]:
    """Lines that name a lock which is not the object's own (`self._lock`)."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr in _NAMES:
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not (own and node.attr == "_lock"):
                found.append(node.lineno)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            words = [one.value for one in node.args if isinstance(one, ast.Constant)]
            if name in _READERS and set(words) & set(_NAMES):
                found.append(node.lineno)
    return sorted(found)


def outside_books() -> Iterator[tuple[str, str]]:
    """Path below the package, and code."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        if not name.startswith("store/books/"):
            yield name, path.read_text(encoding="utf-8")


def test_the_lock_is_named_in_the_books_only() -> None:
    assert {name: lines for name, code in outside_books() if (lines := names_of_lock(code))} == {}
    books = [*(_PACKAGE / "store" / "books").glob("*.py")]
    naming = [path for path in books if names_of_lock(path.read_text(encoding="utf-8"))]
    assert len(naming) > 10  # so it looks for what there is


@pytest.mark.parametrize(
    "planted",
    [
        "with state.lock:\n    pass",
        "def f(self):\n    with self._state.lock:\n        pass",
        "lock = store.state.lock",
        "self._store._state.lock.acquire()",
        "getattr(state, 'lock').acquire()",
        "operator.attrgetter('lock')(state)",
        "state._lock",
    ],
)
def test_whoever_names_it_is_found(planted: str) -> None:
    assert names_of_lock(planted)


def test_an_object_may_have_a_lock_of_its_own() -> None:
    assert names_of_lock("with self._lock:\n    self._pending.clear()") == []


# What other modules call of the state itself: words that are read at once, and what is done while
# nobody else uses the books yet.
_READ: Final = {"suspended", "held", "waits_for"}
_BEFORE_USE: Final = {
    ("store/upkeep/opening.py", "add_copy"),
}


def test_methods_that_expect_the_lock_are_called_by_the_books_only() -> None:
    methods = {name for name, _ in inspect.getmembers(StoreState, inspect.isfunction)} - _READ
    called = set()
    for name, code in outside_books():
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of = node.func.value
            owner = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
            if owner in ("state", "_state") and node.func.attr in methods:
                called.add((name, node.func.attr))
    assert called == _BEFORE_USE


_INDEX_BYTES: Final = 9 << 20  # which the local tier keeps room for


class Watched(Bench):
    """Three tiers in directories, every limit set, with a name for everything that may wait."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults = Faults()
        self.terms = Terms()
        policy = StorePolicy(min_free_percent=0.001, daily_write_bytes=1 << 30, ttl_seconds=1e6)
        index = root / "local" / INDEX_NAME
        super().__init__(
            tiers=self.directories(),
            index_path=index,
            policy=policy,
            decide=self.decide,
            high_watermark=0.98,
            low_watermark=0.95,
        )

    def decide(self, model: str) -> Terms:
        return self.terms

    def directories(self) -> list[tuple[Tier, int]]:
        return [
            (FsTier(TierKind.RAM, self.root / "ram"), disk_budget(12)),
            (FsTier(TierKind.LOCAL, self.root / "local"), _INDEX_BYTES + disk_budget(8)),
            (remote_tier(self.root / "remote", self.faults), disk_budget(400)),
        ]

    def look(self) -> None:
        mover = self.store._remote
        assert mover is not None
        self.tick(200)  # a scan is due
        while mover.step():
            pass

    def file(self, tier: str, key: BlockKey) -> Path:
        name = key.hex()
        return self.root / tier / "v1" / NAMESPACE.hex() / name[:2] / f"{name}.kvb"

    def everything(self) -> None:
        """What clients, people and the store itself do."""
        for first in range(0, 400, 20):  # far more than RAM holds
            self.put(range(first, first + 10))
            self.store.run_pending()
        kept, damaged, gone = (self.put(range(at, at + 10)) for at in (1000, 1100, 1200))
        self.store.run_pending()
        self.look()
        assert [bool(self.in_tier(index)) for index in range(3)] == [True] * 3
        admin = Administration(self.store, alone=False)
        admin.pin(kept[-1].key.hex())
        content = bytearray(self.file("ram", damaged[0].key).read_bytes())
        content[4096] ^= 1
        self.file("ram", damaged[0].key).write_bytes(content)
        assert self.store.report_corrupt(NAMESPACE, damaged[0].key)
        assert damaged[0].key not in self.in_tier(0)
        for tier in ("ram", "local"):
            self.file(tier, gone[0].key).unlink(missing_ok=True)
        assert self.rows(range(1000, 1010)) == 10
        for blocks in (kept, gone):
            self.store.release(self.store.lease(NAMESPACE, [one.key for one in blocks]).lease_id)
        self.store.remove_seq(NAMESPACE, [one.key for one in damaged])
        self.terms = Terms(budget_bytes=20 * FILE_BYTES)
        self.store.set_terms(self.decide)
        self.store.run_pending()
        self.put(range(2000, 2010))
        self.store.set_budget(TierKind.LOCAL, _INDEX_BYTES + disk_budget(4))
        self.terms = Terms()
        self.store.set_terms(self.decide)
        self.faults.fail(errno.EIO)
        self.look()
        self.faults.heal()
        list(admin.verify(repair=True))
        admin.unpin(kept[-1].key.hex())
        admin.remove(Selection(ids=(kept[-1].key.hex(),)), dry_run=False)
        admin.collect(older_than_seconds=300, models=None, dry_run=False)
        self.store.run_pending()
        self.look()
        self.store.flush_index()
        self.store.report()

    def restart(self, *, index: bool) -> None:
        self.store.close()
        if not index:
            (self.root / "local" / INDEX_NAME).unlink()
        self.tiers = self.directories()
        self.open()


def test_nothing_waits_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_lock(monkeypatch)
    bench = Watched(tmp_path)
    bench.everything()
    for index in (True, False):
        bench.restart(index=index)
        bench.look()
        assert bench.rows(range(2000, 2010)) == 10
    bench.store.close()
    assert seen == []
    with bench.state.lock:
        tmp_path.stat()
    assert len(seen) == 1  # so it sees what there is
