"""Room: what goes for it, and that what one writer makes is not another's."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.terms import Terms
from ollama_tiering.store.serving.offers import BlockOffer, Outcome
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.space import FreeSpace
from ollama_tiering.store.upkeep import making_room, unusable
from tests.unit.store.ruled import Ruled
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS, keys_of

WRITERS = 3
LARGE = 8  # small blocks that must go for a large one
TURNS = 12


class SlowToForget(MemoryTier):
    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        time.sleep(0.001)
        super().remove(namespace, key)


def test_a_writer_of_large_blocks_gets_room_among_writers_of_small_ones() -> None:
    """They hold one block open each, so there is always enough to evict; but it is evicted one by
    one, and each of them would fit where the last one was.
    """
    tier = SlowToForget(TierKind.RAM)
    budget_bytes = (WRITERS + 3 * LARGE) * FILE_BYTES
    store = TieredStore([(tier, budget_bytes)], background=False, measure=False)
    outcomes: list[Outcome] = []
    over = threading.Event()

    def put_small(writer: int) -> None:
        session = store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
        for number in itertools.count(writer * 1_000_000):
            (block,) = samples.sequence(NS, [number])
            (reserved,) = session.reserve([block.offer])
            outcomes.append(reserved.outcome)
            if reserved.outcome is Outcome.RESERVED:
                session._pending[reserved.reservation_id].temp.write_at(0, block.data)
                session.commit([reserved.reservation_id])
            if over.is_set():
                break
        store.close_session(session)

    small = [threading.Thread(target=put_small, args=(number,)) for number in range(WRITERS)]
    for writer in small:
        writer.start()
    try:
        for number in range(TURNS):
            session = store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
            key = BlockKey(number.to_bytes(32, "big"))
            offer = BlockOffer(key, NAMESPACE, LARGE * FILE_BYTES)
            outcomes.extend(reserved.outcome for reserved in session.reserve([offer]))
            time.sleep(0.01)  # for the small ones to fill the tier again, once it is released
            store.close_session(session)
    finally:
        over.set()
        for writer in small:
            writer.join(60)
    assert store.report().tiers[0].stats.evicted_blocks > TURNS, "the tier was full"
    store.close()
    assert len(outcomes) > TURNS + WRITERS
    assert set(outcomes) == {Outcome.RESERVED}


def test_nothing_goes_for_a_block_that_its_models_budget_can_never_hold() -> None:
    bench = Ruled(ram=None, local=40)
    blocks = bench.put(range(8))
    bench.rule(Terms(budget_bytes=3 * FILE_BYTES))
    level = bench.state.levels[0]
    assert making_room.reserve(bench.state, level, 4 * FILE_BYTES, NAMESPACE) is None
    assert bench.in_tier(0) == keys_of(blocks)


def test_quarantine_is_not_emptied_where_only_the_model_has_no_room() -> None:
    bench = Ruled(ram=None, local=40)
    blocks = bench.put(range(12))
    level = bench.state.levels[0]
    assert unusable.quarantine(bench.state, level, NAMESPACE, blocks[-1].key)
    bench.rule(Terms(budget_bytes=2 * FILE_BYTES))
    lease = bench.lease(blocks[:2])
    assert making_room.reserve(bench.state, level, FILE_BYTES, NAMESPACE) is None
    assert level.tier.quarantined_bytes() == FILE_BYTES
    bench.store.release(lease)
    reservation = making_room.reserve(bench.state, level, FILE_BYTES, NAMESPACE)
    assert reservation is not None
    reservation.release()


def test_at_the_disks_floor_a_model_at_its_budget_takes_the_room_of_its_own() -> None:
    bench = Ruled(ram=None, local=40)
    others = bench.put_other(range(4 * BLOCK_TOKENS))  # the oldest
    bench.put(range(4 * BLOCK_TOKENS))
    bench.rule(Terms(budget_bytes=4 * FILE_BYTES))
    level = bench.state.levels[0]
    level.space = FullDisk(bench, blocks=8)
    bench.try_put(samples.sequence(NS, [99]))
    assert bench.in_tier(0) >= keys_of(others)


class FullDisk(FreeSpace):
    """At its floor with so many blocks."""

    def __init__(self, bench: Ruled, blocks: int) -> None:
        super().__init__(Path(), 1, lambda: bench.now)
        self._bench, self._blocks = bench, blocks

    def headroom_bytes(self, *, fresh: bool = False) -> int:
        return (self._blocks - len(self._bench.in_tier(0))) * FILE_BYTES
