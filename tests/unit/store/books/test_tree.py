"""BlockTree: the match it finds is the best there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ollama_tiering.store.block.key import (
    BlockKey,
    NamespaceId,
    prefix_chain,
    tokens_to_bytes,
)
from ollama_tiering.store.books.tree import BlockRecord, BlockTree, common_rows
from tests.tokens import tokens_from_bytes
from tests.unit.store.trees import NS, records, tree_of

NAMESPACE = NS.digest()
SEQUENCES = st.lists(st.lists(st.integers(-1, 1), min_size=1, max_size=11), max_size=8)


def matched(tree: BlockTree, prompt: list[int]) -> int:
    data = tokens_to_bytes(prompt)
    found = tree.match(NAMESPACE, prefix_chain(NAMESPACE, data, 4), data, 4)
    return sum(rows for _, rows in found)


@given(SEQUENCES, st.lists(st.integers(-1, 1), max_size=12))
def test_the_match_is_the_longest_common_prefix_of_all(
    sequences: list[list[int]], prompt: list[int]
) -> None:
    best = 0
    for tokens in sequences:
        same = 0
        while same < min(len(tokens), len(prompt)) and tokens[same] == prompt[same]:
            same += 1
        best = max(best, same)
    assert matched(tree_of(sequences), prompt) == best


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_adding_and_discarding_leaves_an_empty_tree(
    sequences: list[list[int]], rng: object
) -> None:
    tree = tree_of(sequences)
    keys = [record.key for record in tree]
    getattr(rng, "shuffle")(keys)  # noqa: B009 - the strategy's type has no public name
    for key in keys:
        tree.discard(key)
        tree.discard(key)
    assert len(tree) == 0
    assert not tree._children


@given(st.lists(st.integers(-3, 3), max_size=9), st.lists(st.integers(-3, 3), max_size=9))
def test_common_rows_counts_leading_equal_tokens(a: list[int], b: list[int]) -> None:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    assert common_rows(tokens_to_bytes(a), tokens_to_bytes(b)) == same


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=8))
def test_covers_and_covered_by_agree(tails: list[list[int]]) -> None:
    tree = tree_of(tails)
    for record in tree:
        tokens = tokens_from_bytes(record.tokens)
        shorter = {
            tuple(tail) for tail in tails if len(tail) < len(tokens) and tokens[: len(tail)] == tail
        }
        assert {tuple(tokens_from_bytes(r.tokens)) for r in tree.covers(record)} == shorter
        longer = [t for t in tails if len(t) > len(tokens) and t[: len(tokens)] == tokens]
        assert (tree.covered_by(record) is not None) == bool(longer)


def test_blocks_with_children_are_never_covered() -> None:
    tree = BlockTree()
    for record in records([1, 2, 3, 4, 5]):
        tree.add(record)
    assert tree.child_count(records([1, 2, 3, 4])[0].key) == 1
    assert [r.tokens for r in tree.covers(records([1, 2, 3, 4])[0])] == []


def test_ancestors_go_up_to_the_first_block() -> None:
    tree = tree_of([list(range(10))])
    chain = records(list(range(10)))
    assert [r.key for r in tree.ancestors(chain[-1].key)] == [r.key for r in chain[::-1]]
    tree.discard(chain[1].key)
    assert [r.key for r in tree.ancestors(chain[-1].key)] == [chain[-1].key]


def test_keys_of_another_namespace_do_not_match() -> None:
    tree = tree_of([[1, 2, 3, 4]])
    data = tokens_to_bytes([1, 2, 3, 4])
    keys = prefix_chain(NAMESPACE, data, 4)
    assert tree.match(NamespaceId(bytes(32)), keys, data, 4) == []


def test_what_blocks_have_in_common_is_in_memory_once() -> None:
    tree = BlockTree()
    namespace = bytes(range(32))
    for number in range(3):  # as each comes out of a header of its own
        tree.add(
            BlockRecord(
                key=BlockKey(bytes([number]) * 32),
                namespace=NamespaceId(bytes(bytearray(namespace))),
                parent=bytes(bytearray(bytes([number - 1]) * 32 if number == 2 else namespace)),
                tokens=number.to_bytes(4, "little"),
                plain_rows=1,
                file_bytes=1,
                last_use=0.0,
            )
        )
    first, second, child = tree
    assert first.namespace is second.namespace is child.namespace
    assert first.parent is second.parent is first.namespace
    assert child.parent is second.key
