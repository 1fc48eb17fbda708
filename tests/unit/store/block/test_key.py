"""Keys and namespaces beyond the golden vectors: what must differ differs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ollama_tiering.store.block.key import (
    NAMESPACE_FIELDS,
    BlockExtra,
    LayerSpec,
    Namespace,
    as_key,
    as_namespace,
    block_key,
    digest_from_hex,
    namespace_digest,
    prefix_chain,
    tokens_to_bytes,
)
from tests.tokens import tail_key, tokens_from_bytes

NS = Namespace.of(
    model="m", engine="e", cache_dtype="f16", layers=[LayerSpec(0, 0, 1, 8, 8)], block_tokens=4
)
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30)


@pytest.mark.parametrize("name", NAMESPACE_FIELDS)
def test_every_field_of_a_namespace_counts(name: str) -> None:
    fields = dict(NS.fields())
    assert namespace_digest(fields.items()) == NS.digest()
    fields[name] += "x"
    assert namespace_digest(fields.items()) != NS.digest()


def test_fields_cannot_flow_into_each_other() -> None:
    assert namespace_digest([("a", "bc")]) != namespace_digest([("ab", "c")])
    assert namespace_digest([("a", ""), ("b", "")]) != namespace_digest([("a", "b"), ("", "")])


def test_layers_are_ordered_by_child_and_layer() -> None:
    specs = [LayerSpec(1, 0, 1, 8, 8), LayerSpec(0, 1, 1, 8, 8), LayerSpec(0, 0, 1, 8, 8)]
    one = Namespace.of(model="m", engine="e", cache_dtype="f16", layers=specs)
    other = Namespace.of(model="m", engine="e", cache_dtype="f16", layers=specs[::-1])
    assert one == other
    assert one.layers.startswith("0:0:full:0:1:8:8;0:1:")


def test_an_unknown_layer_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of full, swa, chunked"):
        LayerSpec(0, 0, 1, 8, 8, kind="ring")


@given(IDS)
def test_tokens_survive_the_round_trip(ids: list[int]) -> None:
    assert tokens_from_bytes(tokens_to_bytes(ids)) == ids
    assert tokens_to_bytes(np.array(ids, dtype=np.int32)) == tokens_to_bytes(ids)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**40])
def test_a_token_that_is_no_int32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        tokens_to_bytes([1, token])


@given(IDS, st.integers(1, 9))
def test_a_chain_depends_on_all_tokens_before(ids: list[int], block_tokens: int) -> None:
    data = tokens_to_bytes(ids)
    chain = prefix_chain(NS.digest(), data, block_tokens)
    assert len(chain) == len(ids) // block_tokens
    for index in range(len(chain)):
        cut = prefix_chain(NS.digest(), data[: 4 * block_tokens * (index + 1)], block_tokens)
        assert cut == chain[: index + 1]
    if ids:
        changed = tokens_to_bytes([ids[0] ^ 1, *ids[1:]])
        assert not set(prefix_chain(NS.digest(), changed, block_tokens)) & set(chain)


def test_extras_are_part_of_the_key_at_their_row() -> None:
    tokens = tokens_to_bytes([1, 2, 3, 4])
    plain = block_key(NS.digest(), tokens)
    one = block_key(NS.digest(), tokens, [BlockExtra(0, bytes(32))])
    two = block_key(NS.digest(), tokens, [BlockExtra(1, bytes(32))])
    assert len({plain, one, two}) == 3
    chain = prefix_chain(NS.digest(), tokens * 2, 4, [BlockExtra(5, bytes(32))])
    assert chain == [plain, block_key(plain, tokens, [BlockExtra(1, bytes(32))])]


def test_a_tail_key_is_that_of_a_block_with_fewer_tokens() -> None:
    tokens = tokens_to_bytes([1, 2, 3, 4, 5])
    (first,) = prefix_chain(NS.digest(), tokens, 4)
    assert tail_key(NS.digest(), tokens, 4) == block_key(first, tokens_to_bytes([5]))
    assert tail_key(NS.digest(), tokens[:16], 4) is None
    assert tail_key(NS.digest(), b"", 4) is None


def test_identities_have_32_bytes() -> None:
    for check in (as_key, as_namespace):
        assert check(bytes(32)) == bytes(32)
        with pytest.raises(ValueError, match="32 bytes, not 31"):
            check(bytes(31))


@pytest.mark.parametrize("text", ["", "00", "AB" * 32, "zz" * 32, "ab" * 33, "../" + "a" * 61])
def test_only_lower_case_hex_of_32_bytes_names_a_block(text: str) -> None:
    assert digest_from_hex(text) is None


def test_a_hex_name_gives_its_digest() -> None:
    assert digest_from_hex("ab" * 32) == b"\xab" * 32
