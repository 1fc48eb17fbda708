"""What an engine says of itself becomes a namespace: whatever it names separates its blocks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.sidecar.engine.identity import Identity, caches, identity_of
from ollama_tiering.store.block.key import namespace_digest
from ollama_tiering.store.errors import InvalidBlock
from tests.contract.fake_engine import FIELDS, hello


def extra_of(identity: Identity) -> str:
    return dict(identity.fields)["extra"]


def test_every_field_and_every_layer_separates() -> None:
    full = hello(fields={"rope": "b", "adapters": "a"})
    others = [
        hello(fields={"rope": "c", "adapters": "a"}),
        hello(fields={"rope": "b", "adapters": "b"}),
        hello(fields={"rope": "b"}),
        hello(fields={"rope": "b", "adapters": "a", "v": "transposed"}),
        hello(fields={"rope": "b", "adapters": "a", "model": "sha256-other"}),
        hello(fields={"rope": "b", "adapters": "a", "engine": "fake/2+0"}),
        hello(fields={"rope": "b", "adapters": "a", "flash_attention": "off"}),
        replace(full, k_dtype="q8_0"),
        replace(full, v_dtype="q8_0"),
        replace(full, states=True),
        hello(layers=3, fields={"rope": "b", "adapters": "a"}),
    ]
    for geometry in ("kind", "window", "kv_heads", "k_head_dim", "v_head_dim"):
        first, second = full.layers
        others.append(replace(full, layers=(replace(first, **{geometry: 2}), second)))
    names = [identity_of(one).namespace for one in (full, *others)]
    assert len(set(names)) == len(names)


def test_rows_of_exact_attention_are_not_stocks() -> None:
    """Nor those of another version or kernel of it, however alike all else is."""
    said = ["", "exact 2 (avx512)", "exact 2 (avx2)", "exact 3 (avx512)"]
    found = [identity_of(hello(fields={"attention": one})) for one in said]
    assert len({one.namespace for one in found}) == len(said)
    assert [one.cpu_attention for one in found] == said
    assert found[0].namespace == identity_of(hello()).namespace, "stock's are where they were"


def test_the_namespace_is_the_digest_of_its_description_and_the_order_of_fields_is_none() -> None:
    one = hello(fields={"v": "transposed", "rope": "b"})
    identity = identity_of(one)
    assert namespace_digest(identity.fields) == identity.namespace
    turned = replace(one, fields=tuple(reversed(one.fields)))
    assert identity_of(turned) == identity
    assert extra_of(identity) == "rope=b;v=transposed"


def test_no_value_can_look_like_another_part() -> None:
    assert extra_of(identity_of(hello(fields={"rope": "b;v=transposed"}))) == "rope=b_v:transposed"


def test_of_a_salt_only_its_digest_is_kept_the_one_that_the_patched_server_makes() -> None:
    identity = identity_of(hello(fields={"salt": "pepper\n"}))
    digest = hashlib.sha256(b"kvt-salt-1\x00pepper\n").hexdigest()[:32]
    assert extra_of(identity) == f"salt={digest}"
    assert "pepper" not in repr(identity)
    assert extra_of(identity_of(hello(fields={"salt": ""}))) == ""


def test_who_resumes_at_checkpoints_has_another_namespace() -> None:
    assert extra_of(identity_of(hello(states=True))) == "states=opaque"


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"engine": ""},
        {"model": "../m.gguf"},
        {"model": "m" * 129},
        {"flash_attention": "auto"},
        {"kv": "q8_0"},
        {"states": "0"},
        {"Rope": "b"},
        {"rope": "b\n"},
        {"rope": "b" * 4097},
    ],
    ids=str,
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidBlock):
        identity_of(hello(fields=fields))


def test_a_field_that_is_there_twice_is_refused() -> None:
    with pytest.raises(InvalidBlock, match="twice"):
        identity_of(m.Hello((*FIELDS.items(), ("model", "other")), hello().layers))


LAYER = hello().layers[0]


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (LAYER, LAYER),
        (replace(LAYER, layer=1), LAYER),
        (replace(LAYER, kind=3),),
        (replace(LAYER, k_row_bytes=0, v_row_bytes=0),),
        (replace(LAYER, k_row_bytes=1 << 31),),
        tuple(replace(LAYER, layer=number) for number in range(2049)),
    ],
    ids=["none", "twice", "order", "kind", "no rows", "rows of gigabytes", "too many"],
)
def test_layers_that_make_no_sense_are_refused(layers: tuple[m.Layer, ...]) -> None:
    with pytest.raises(InvalidBlock):
        identity_of(replace(hello(), layers=layers))


@pytest.mark.parametrize("dtypes", [{"k_dtype": ""}, {"v_dtype": "F16"}, {"k_dtype": "x" * 17}])
def test_types_of_rows_that_make_no_sense_are_refused(dtypes: dict[str, Any]) -> None:
    with pytest.raises(InvalidBlock):
        identity_of(hello(**dtypes))


def test_a_layer_without_v_has_one_segment_and_types_may_differ() -> None:
    said = replace(hello(), layers=(replace(LAYER, v_row_bytes=0),), k_dtype="q8_0")
    identity = identity_of(said)
    assert [(shape.kind, shape.dtype) for shape in identity.shapes] == [(1, "q8_0")]
    assert dict(identity.fields)["cache_dtype"] == "q8_0/f16"


def test_caches_are_said_as_other_runners_say_them() -> None:
    window = replace(LAYER, child=1, kind=1, window=512)
    assert caches(replace(hello(), layers=(LAYER, window))) == "plain + sliding window (512) f16"
    assert caches(hello(states=True)) == "plain + states f16"
    assert caches(replace(hello(), layers=())) == ""  # of one that only says why it is not tiered
