"""Room that one writer makes is not another's."""

from __future__ import annotations

import itertools
import threading
import time

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.serving.offers import BlockOffer, Outcome
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tools import samples
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS

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
