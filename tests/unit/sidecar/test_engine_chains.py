"""Keys of a prompt's blocks: those of its tokens, of what stands beside them and of its rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import pytest

from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS
from ollama_tiering.sidecar.engine.writes import STEP_BYTES
from ollama_tiering.sidecar.policy.chains import PIECE_KEYS, Chains
from ollama_tiering.store import BlockExtra, BlockKey, block_key, extras_of
from ollama_tiering.store.block.key import as_namespace

NAMESPACE = as_namespace(bytes(32))


def one_by_one(
    tokens: bytes, fingerprints: Sequence[bytes], extras: Sequence[BlockExtra] = ()
) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for index, fingerprint in enumerate(fingerprints):
        inside = tokens[index * STEP_BYTES : (index + 1) * STEP_BYTES]
        parent: bytes = keys[-1] if keys else NAMESPACE
        beside = extras_of(extras, index * BLOCK_TOKENS, BLOCK_TOKENS)
        keys.append(block_key(parent, inside, beside, fingerprint))
    return keys


def numbers(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(2) for _ in range(most)]


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_that_goes_on_from_the_last_one_is_that_of_its_tokens_and_contents(
    seed: int,
) -> None:
    rng = random.Random(seed)
    chains = Chains(NAMESPACE, BLOCK_TOKENS)
    tokens, fingerprints = b"", []
    for _ in range(4):
        kept = rng.randrange(len(tokens) // 4 + 1)
        tokens = tokens[: 4 * kept] + rng.randbytes(4 * rng.randrange(300))
        blocks = -(-len(tokens) // STEP_BYTES)
        same = rng.randrange(len(fingerprints) + 1)
        fingerprints = [*fingerprints[:same], *(bytes([n]) * 8 for n in numbers(rng, blocks))][
            :blocks
        ]
        said = fingerprints[: rng.randrange(blocks + 1)]
        made = list(chain.from_iterable(chains.in_pieces(tokens, (), said)))
        assert made == one_by_one(tokens, said)


@pytest.mark.parametrize("first", [0, 1, 255, 256, 257, 600])
def test_extras_are_in_the_keys_of_their_blocks_and_no_piece_is_too_large(first: int) -> None:
    tokens, fingerprints = bytes(700 * STEP_BYTES), [bytes(8)] * 700
    places = [first * BLOCK_TOKENS + row for row in (0, 3, 63, 64)]
    extras = [BlockExtra(place, bytes([place % 7])) for place in places]
    pieces = list(Chains(NAMESPACE, BLOCK_TOKENS).in_pieces(tokens, extras, fingerprints))
    assert list(chain.from_iterable(pieces)) == one_by_one(tokens, fingerprints, extras)
    assert max(map(len, pieces)) <= PIECE_KEYS
    plain = one_by_one(tokens, fingerprints)
    assert list(chain.from_iterable(pieces))[:first] == plain[:first]
    assert list(chain.from_iterable(pieces))[first] != plain[first]


def test_a_text_with_an_image_is_not_taken_for_the_last_one_without() -> None:
    tokens, fingerprints = bytes(3 * STEP_BYTES), [bytes(8)] * 3
    chains = Chains(NAMESPACE, BLOCK_TOKENS)
    image = [BlockExtra(70, b"i")]
    for extras in ((), image, (), [BlockExtra(70, b"j")]):
        keys = list(chain.from_iterable(chains.in_pieces(tokens, extras, fingerprints)))
        assert keys == one_by_one(tokens, fingerprints, extras)
