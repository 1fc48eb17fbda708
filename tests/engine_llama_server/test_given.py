"""What a server is given to change what is in the model's file: control vectors, overridden values,
RoPE. All of it is in the name of what is stored, and something else finds nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.damaged_file import flip_bit
from tests.engine_llama_server.given import (
    PROMPT,
    another_file_of_the_name_finds_nothing,
    comes_back_with_the_same_alone,
    filled,
)
from tests.engine_llama_server.parts import make_control_vector
from tests.engine_llama_server.server import LlamaServer, Starter
from tests.engine_llama_server.test_damaged_model import stored, wait_reason
from tests.engine_llama_server.test_llama_server import blocks_of, text, wait_stored
from tests.engine_llama_server.test_states import settled
from tests.sidecar import SidecarProcess

EPSILON = "llama.attention.layer_norm_rms_epsilon=float:"
YARN = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "1024")

# What is given, and what of it is changed then; {one} and {other} are files.
GIVEN: Mapping[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "a control vector": (
        ("--control-vector-scaled", "{one}:0.5"),
        (
            ("--control-vector-scaled", "{one}:0.25"),
            ("--control-vector-scaled", "{other}:0.5"),
            ("--control-vector-scaled", "{one}:0.5,{other}:0.5"),
            ("--control-vector-scaled", "{one}:0.5", "--control-vector-layer-range", "1", "2"),
        ),
    ),
    "overridden values": (
        ("--override-kv", f"{EPSILON}0.01"),
        (("--override-kv", f"{EPSILON}0.02"),),
    ),
    "overridden texts": (
        ("--override-kv", f"{EPSILON}0.01,general.name=str:one;two=three"),
        (
            ("--override-kv", f"{EPSILON}0.01,general.name=str:one_two:three"),
            ("--override-kv", f"{EPSILON}0.01"),
        ),
    ),
    "RoPE": (
        ("--rope-freq-base", "9000", "--rope-freq-scale", "0.5"),
        (
            ("--rope-freq-base", "9000"),
            ("--rope-freq-base", "9001", "--rope-freq-scale", "0.5"),
            ("--rope-freq-base", "9002", "--rope-scaling", "none"),
        ),
    ),
    "YaRN": (
        YARN,
        (
            (*YARN[2:], "--rope-scaling", "linear"),
            (*YARN, "--yarn-ext-factor", "0.5"),
            (*YARN, "--yarn-beta-fast", "16"),
            (*YARN, "--yarn-beta-slow", "2"),
            (*YARN[:-1], "512"),
        ),
    ),
    "a factor of attention": (
        ("--yarn-attn-factor", "0.5"),
        (("--yarn-attn-factor", "0.75"),),
    ),
    "places of tensors": (
        ("--override-tensor", r"blk\.0\.ffn_up.weight=CPU"),
        (("--override-tensor", r"blk\.1\.ffn_up.weight=CPU"),),
    ),
    "more places than fit into a field": (
        ("--override-tensor", ",".join(rf"blk\.{i}\.{'x' * 60}=CPU" for i in range(99))),
        (("--override-tensor", ",".join(rf"blk\.{i}\.{'x' * 60}=CPU" for i in range(98))),),
    ),
}
CHANGES_NOTHING = ("places of tensors", "more places than fit into a field")  # on a CPU


@pytest.fixture
def rng() -> random.Random:
    return random.Random(31)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        name: make_control_vector(tmp_path / f"{name}.gguf", seed=seed)
        for seed, name in enumerate(("one", "other"))
    }


@pytest.mark.parametrize("what", GIVEN)
def test_after_a_kill_the_answer_is_that_of_the_resident_cache_and_another_value_finds_nothing(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    files: dict[str, Path],
    what: str,
) -> None:
    given, others = GIVEN[what]
    comes_back_with_the_same_alone(
        *(start, sidecar, rng, filled(given, files)),
        [filled(other, files) for other in ((), *others)],
        changes_nothing=what in CHANGES_NOTHING,
    )


def test_another_control_vector_under_the_same_name_finds_nothing(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, files: dict[str, Path]
) -> None:
    options = filled(("--control-vector", "{one}"), files)
    another_file_of_the_name_finds_nothing(start, sidecar, rng, options, files["one"])


def test_a_control_vector_that_was_changed_since_it_was_loaded_ends_the_tiering(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, files: dict[str, Path]
) -> None:
    path = files["one"]

    def changed(server: LlamaServer) -> None:
        flip_bit(path, path.read_bytes(), path.stat().st_size - 2)
        server.complete(text(rng, PROMPT, first=6))

    server = start(*filled(("--control-vector", "{one}"), files), sidecar=sidecar)
    changed(server)
    wait_reason(sidecar, server, "the control vector's file is another one than when it was loaded")
    assert stored(sidecar) == 0
    server.kill()
    server = start(*filled(("--control-vector", "{one}"), files), sidecar=sidecar)
    server.complete(text(rng, PROMPT))
    wait_stored(sidecar, server, blocks_of(PROMPT))
    settled(sidecar, server)
    before = stored(sidecar)
    changed(server)
    wait_reason(sidecar, server, "changed after it was loaded")
    assert stored(sidecar) == before
