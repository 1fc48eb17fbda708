"""Blocks of sequences in a tree by itself."""

from __future__ import annotations

from measure.store import samples
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from ollama_tiering.store.books.tree import BlockRecord, BlockTree

NS = samples.namespace(layers=1)


def records(tokens: list[int]) -> list[BlockRecord]:
    made = []
    for block in samples.sequence(NS, tokens):
        meta = read_meta(buffer_reader(block.data), len(block.data))
        made.append(
            BlockRecord(
                key=meta.key,
                namespace=meta.namespace,
                parent=meta.parent,
                tokens=meta.tokens,
                plain_rows=meta.plain_rows,
                file_bytes=meta.file_bytes,
                last_use=0.0,
            )
        )
    return made


def tree_of(sequences: list[list[int]]) -> BlockTree:
    tree = BlockTree()
    for tokens in sequences:
        for record in records(tokens):
            tree.add(record)
    return tree
