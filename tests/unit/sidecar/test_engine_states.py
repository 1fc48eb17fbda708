"""Which state a prompt may go on at: one within the rows that it shares with what is stored."""

from __future__ import annotations

import pytest

from ollama_tiering.protocol.engine.messages import StateOffer
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS, identity_of
from ollama_tiering.sidecar.engine.states import last_state, plan_state
from ollama_tiering.store.block.key import BlockKey, prefix_chain, tokens_to_bytes
from ollama_tiering.store.books.report import AttachedBlock, MatchedBlock
from ollama_tiering.store.tiers.contract import TierKind
from tests.contract.fake_engine import hello

IDENTITY = identity_of(hello(states=True))
STORED = list(range(2 * BLOCK_TOKENS))


def matched(shared: int, states: list[int]) -> list[MatchedBlock]:
    """Both stored blocks, of which a prompt shares so many rows, with states at these positions."""
    keys = prefix_chain(IDENTITY.namespace, tokens_to_bytes(STORED), BLOCK_TOKENS)
    hung: dict[BlockKey, list[AttachedBlock]] = {key: [] for key in keys}
    for at in states:
        plan, on = plan_state(IDENTITY, tokens_to_bytes(STORED), StateOffer(at, 8), keys)
        hung[on].append(AttachedBlock(plan.key, 8, 8, 0.0))
    found = []
    for index, key in enumerate(keys):
        rows = min(max(shared - index * BLOCK_TOKENS, 0), BLOCK_TOKENS)
        if rows:
            named = tuple(hung[key])
            found.append(MatchedBlock(key, rows, BLOCK_TOKENS, TierKind.RAM, 1, 1, 0.0, named))
    return found


@pytest.mark.parametrize("first", [0, BLOCK_TOKENS])
def test_a_state_behind_the_first_row_that_differs_is_never_taken(first: int) -> None:
    """Stored block and prompt differ at row 5 and have the same token at row 9."""
    prompt = [*STORED]
    prompt[first + 5] = 999
    found = matched(first + 5, [first + 3, first + 10])
    tokens = tokens_to_bytes(prompt)
    n_tokens, _ = last_state(IDENTITY, tokens, found, 0, len(prompt)) or (0, None)
    assert n_tokens == first + 3


def test_the_state_of_most_tokens_is_taken() -> None:
    found = matched(2 * BLOCK_TOKENS, [1, 10, BLOCK_TOKENS, BLOCK_TOKENS + 9])
    tokens = tokens_to_bytes(STORED)

    def at(above: int, most: int) -> int:
        state = last_state(IDENTITY, tokens, found, above, most)
        return state[0] if state else 0

    assert at(0, 2 * BLOCK_TOKENS) == BLOCK_TOKENS + 9
    assert at(0, BLOCK_TOKENS + 8) == BLOCK_TOKENS
    assert at(0, BLOCK_TOKENS - 1) == 10
    assert at(0, 9) == 1
    assert at(1, 9) == 0
    assert at(BLOCK_TOKENS + 9, 2 * BLOCK_TOKENS) == 0
