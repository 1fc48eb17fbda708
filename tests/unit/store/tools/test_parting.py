"""The tokens that tell a conversation from others, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ollama_tiering.store.tools import parting
from ollama_tiering.store.tools.parting import AFTER_TOKENS, BEFORE_TOKENS, telling_tokens
from tests.tokens import tokens_from_bytes
from tests.unit.store.trees import records, tree_of

SEQUENCES = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=6, unique_by=tuple
)


def shared(one: list[int], other: list[int]) -> int:
    """Tokens from the start on that both have."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@given(SEQUENCES)
def test_it_parts_where_it_shares_nothing_more_with_any_other(sequences: list[list[int]]) -> None:
    tree = tree_of(sequences)
    ends = [(tokens, records(tokens)[-1]) for tokens in sequences]
    # Where others go on from the last block it is no conversation of its own.
    chains = [(tokens, end) for tokens, end in ends if not tree.child_count(end.key)]
    for tokens, end in chains:
        at = max((shared(tokens, other) for other, _ in chains if other != tokens), default=0)
        found, before = telling_tokens(tree, end)
        assert list(tokens_from_bytes(found)) == tokens
        assert before == at


def test_of_a_long_one_only_the_neighbourhood_is_given() -> None:
    common = [n % 7 for n in range(3 * BEFORE_TOKENS + 2)]
    one, two = ([*common, mark, *range(100, 500)] for mark in (50, 60))
    tree = tree_of([one, two])
    at = len(common)
    for tokens in (one, two):
        found, before = telling_tokens(tree, records(tokens)[-1])
        assert before == BEFORE_TOKENS
        assert list(tokens_from_bytes(found)) == tokens[at - BEFORE_TOKENS : at + AFTER_TOKENS]


def test_one_alone_begins_at_its_first_token_and_one_that_is_gone_has_nothing() -> None:
    tokens = list(range(1000))
    tree = tree_of([tokens])
    found, before = telling_tokens(tree, records(tokens)[-1])
    assert (list(tokens_from_bytes(found)), before) == (tokens[:AFTER_TOKENS], 0)
    assert telling_tokens(tree_of([]), records(tokens)[-1]) == (b"", 0)


def test_what_a_listing_sends_is_bounded() -> None:
    assert parting.MAX_CHAINS * (BEFORE_TOKENS + AFTER_TOKENS) * 4 <= 10 << 20
