"""What of a prompt is stored, and how soon it could be had."""

from __future__ import annotations

from collections.abc import Sequence

from ollama_tiering.store.key import BlockKey, NamespaceId
from ollama_tiering.store.report import MatchedBlock
from ollama_tiering.store.state import StoreState


def match(
    state: StoreState,
    namespace: NamespaceId,
    keys: Sequence[BlockKey],
    tokens: bytes,
    block_tokens: int,
) -> list[MatchedBlock]:
    """Leading run of whole blocks, then the best partly matching child. Counts as use.

    The tier that is named for a block is the one that has it, decoded, in memory soonest.
    """
    with state.lock:
        found = state.tree.match(namespace, keys, tokens, block_tokens)
        if resting := state.resting():  # what lies only there cannot be had now
            reached = [not record.levels.issubset(resting) for record, _ in found]
            if False in reached:
                found = found[: reached.index(False)]
                state.counters.miss("out of reach")
        if found and 2 * found[-1][1] < found[-1][0].rows:
            # A few rows in common, as under one chat template, do not make a block wanted.
            state.touch([found[-1][0]])
            leaf_to_root = [record for record, _ in reversed(found[:-1])]
        else:
            leaf_to_root = [record for record, _ in reversed(found)]
        state.touch(leaf_to_root, hit=True)
        state.admission.used(leaf_to_root)
        speeds = state.speeds()
        kinds = [level.tier.kind for level in state.levels]
        per_block, per_byte = speeds[0]
        blocks = []
        matched = 0
        for record, rows in found:
            file_bytes = stored_bytes = record.file_bytes
            if 0 in record.levels and not record.encoded and not resting:  # by far the most
                nearest, seconds = 0, per_block + file_bytes * per_byte
            else:
                nearest, seconds = state.nearest(record, speeds, resting)
                stored_bytes = record.bytes_at(nearest)
            matched += rows
            blocks.append(
                MatchedBlock(
                    record.key,
                    rows,
                    record.rows,
                    kinds[nearest],
                    stored_bytes,
                    file_bytes,
                    seconds,
                )
            )
        counters = state.counters
        counters.has_calls += 1
        counters.asked_tokens += len(tokens) // 4
        counters.matched_tokens += matched
        if not found:
            counters.miss("unknown prefix")
    return blocks
