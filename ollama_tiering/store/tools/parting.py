"""The tokens that tell a chain from all others of its namespace: those around the place where it
parts from them. A system prompt that many share is not among them.
"""

from __future__ import annotations

from typing import Final

from ollama_tiering.store.block.key import TOKEN_BYTES
from ollama_tiering.store.books.tree import BlockRecord, BlockTree

BEFORE_TOKENS: Final = 128  # the beginning of the sentence, and of the turn
AFTER_TOKENS: Final = 128
MAX_CHAINS: Final = 10_000  # of one listing: what is sent stays below 10 MiB


def telling_tokens(tree: BlockTree, end: BlockRecord) -> tuple[bytes, int]:
    """int32 token ids, and how many of them come before the parting. A chain that shares nothing
    parts at its first token.
    """
    own: list[BlockRecord] = []
    shared: int | None = None
    for record in tree.ancestors(end.key):
        own.append(record)
        shared = tree.shared_rows(record)
        if shared is not None:
            break
    if not own:  # removed just now
        return b"", 0
    at = (shared or 0) * TOKEN_BYTES
    before, after = own[-1].tokens[:at], own[-1].tokens[at:]
    for record in tree.ancestors(own[-1].parent):
        if len(before) >= BEFORE_TOKENS * TOKEN_BYTES:
            break
        before = record.tokens + before
    for record in own[-2::-1]:
        if len(after) >= AFTER_TOKENS * TOKEN_BYTES:
            break
        after += record.tokens
    before = before[-BEFORE_TOKENS * TOKEN_BYTES :]
    return before + after[: AFTER_TOKENS * TOKEN_BYTES], len(before) // TOKEN_BYTES
