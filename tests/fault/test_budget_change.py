"""Budgets go up and down while four clients write: nothing breaks, and the last budget holds."""

from __future__ import annotations

import random
import threading
import time

import pytest

from measure.store import samples
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS

pytestmark = pytest.mark.fault

ROUNDS = 60


def write(store: TieredStore, start: int, failures: list[BaseException]) -> None:
    try:
        with store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS) as session:
            for number in range(ROUNDS):
                blocks = samples.sequence(NS, [start + number, *range(10)])
                ids = []
                for block, reserved in zip(
                    blocks, session.reserve([block.offer for block in blocks]), strict=True
                ):
                    if reserved.outcome is Outcome.RESERVED:
                        pending = session._pending[reserved.reservation_id]
                        pending.temp.write_at(0, block.data)
                        ids.append(reserved.reservation_id)
                session.commit(ids)
    except BaseException as error:
        failures.append(error)


def test_budgets_change_under_writers() -> None:
    tiers = [MemoryTier(TierKind.RAM), MemoryTier(TierKind.LOCAL)]
    store = TieredStore([(tiers[0], 64 * FILE_BYTES), (tiers[1], 64 * FILE_BYTES)], measure=False)
    failures: list[BaseException] = []
    writers = [
        threading.Thread(target=write, args=(store, 1000 * number, failures)) for number in range(4)
    ]
    chance = random.Random(1)
    for writer in writers:
        writer.start()
    changes = 0
    while any(writer.is_alive() for writer in writers):
        kind = chance.choice([TierKind.RAM, TierKind.LOCAL])
        store.set_budget(kind, chance.randint(1, 64) * FILE_BYTES)
        changes += 1
    for writer in writers:
        writer.join()
    assert failures == []
    assert changes > 10
    store.set_budget(TierKind.RAM, 5 * FILE_BYTES)
    store.set_budget(TierKind.LOCAL, 7 * FILE_BYTES)
    end = time.monotonic() + 20
    while any(tier.used_bytes + tier.reserved_bytes > tier.budget_bytes for tier in told(store)):
        assert time.monotonic() < end, told(store)
        time.sleep(0.01)
    store.close()
    for tier, most, level in zip(tiers, (5, 7), store._state.levels, strict=True):
        assert sum(map(len, tier.blocks.values())) <= most * FILE_BYTES
        assert {key for _, key in tier.blocks} == set(level.lru)
        assert level.leaving_bytes == level.lru.reserved_bytes == 0


def told(store: TieredStore):  # type: ignore[no-untyped-def]
    return store.report().tiers
