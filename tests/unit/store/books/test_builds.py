"""What two builds have stored of the same texts, compared block by block."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ollama_tiering.store.block.key import NamespaceId, block_key, tokens_to_bytes
from ollama_tiering.store.books import builds
from ollama_tiering.store.books.builds import SameRows, same_rows
from ollama_tiering.store.books.tree import BlockRecord, BlockTree

MINE, OTHER = NamespaceId(b"m" * 32), NamespaceId(b"o" * 32)
STEP = 4


class Trees:
    """The books of a store that has blocks of STEP tokens; a row's bits are a letter of `rows`."""

    def __init__(self) -> None:
        self.tree = BlockTree()
        self.state: Any = SimpleNamespace(lock=threading.Lock(), tree=self.tree)

    def add(self, namespace: NamespaceId, text: str, rows: str = "", *, plain: int = STEP) -> None:
        """A chain of this text; `rows`: the bits of each block, `a` if not said."""
        parent: bytes = namespace
        for number in range(0, len(text), STEP):
            tokens = tokens_to_bytes([ord(one) for one in text[number : number + STEP]])
            fingerprint = (rows[number // STEP :][:1] or "a").encode() * 8
            key = block_key(parent, tokens, (), fingerprint)
            plain_rows = min(plain, len(tokens) // 4)
            record = BlockRecord(key, namespace, parent, tokens, plain_rows, 1, 0.0)
            record.fingerprint = fingerprint
            self.tree.add(record)
            parent = key

    def compare(self) -> SameRows:
        return same_rows(self.state, MINE, OTHER)


@pytest.fixture
def trees() -> Trees:
    return Trees()


def test_blocks_of_the_same_texts_are_counted_as_far_as_both_have_them(trees: Trees) -> None:
    trees.add(MINE, "onceuponatime")  # ends with a block of one token
    trees.add(OTHER, "onceuponatimethere")
    trees.add(MINE, "onceuponhill")
    trees.add(OTHER, "onceuponhill")
    trees.add(MINE, "another text")
    assert trees.compare() == SameRows(4, 16, 12, differ=False)
    trees.add(OTHER, "onceuponatime")
    assert trees.compare() == SameRows(5, 17, 13, differ=False)


def test_one_block_of_other_rows_is_enough(trees: Trees) -> None:
    trees.add(MINE, "onceuponatime", "aab")
    trees.add(OTHER, "onceuponatime", "aaa")
    assert trees.compare().differ


@pytest.mark.parametrize(("mine", "other"), [("a", "ab"), ("ab", "a")])
def test_a_text_with_two_sets_of_rows_in_either_differs(
    trees: Trees, mine: str, other: str
) -> None:
    for namespace, histories in ((MINE, mine), (OTHER, other)):
        for rows in histories:
            trees.add(namespace, "once", rows)
    assert trees.compare().differ


def test_what_is_not_a_token_alone_is_not_compared(trees: Trees) -> None:
    trees.add(MINE, "onceupon", plain=2)
    trees.add(OTHER, "onceupon")
    assert trees.compare() == SameRows(0, 0, 0, differ=False)


def test_blocks_that_their_tokens_name_are_not_compared(trees: Trees) -> None:
    for namespace in (MINE, OTHER):
        trees.add(namespace, "once")
    for record in trees.tree:
        record.fingerprint = b""
    assert trees.compare() == SameRows(0, 0, 0, differ=False)


def test_no_more_is_compared_than_a_bound(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace in (MINE, OTHER):
        trees.add(namespace, "abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setattr(builds, "MOST_BLOCKS", 3)
    assert trees.compare() == SameRows(3, 12, 12, differ=False)
