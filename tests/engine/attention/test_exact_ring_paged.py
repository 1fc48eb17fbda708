"""Engine 2 with its ring of pieces (csrc/shim/pieces.cpp) in Ollama, on a GPU that is not there and
runs the kernels in an emulation (tests/attention/fakegpu/driver): conversations of several pieces a
layer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.attention import paged
from tests.engine.attention.exact_op import changed_binary
from tests.engine.attention.fake_gpu import MINIMUM_MIB, devices, offloaded
from tests.engine.attention.paged import BOTH_LATE, EXACT
from tests.engine.attention.test_exact_ring import SMALL, WHOLE
from tests.engine.harness import Result, Server, Sidecar, assert_same, text
from tests.engine.test_replay import assert_nothing_wrong, environment, replay, storm

LAYERS = 4  # of g2
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def ring_binary(exact_binary: Path, binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_binary(exact_binary, binary, tmp_path_factory.mktemp("ring"), *SMALL)


def _answers(server: Server, tokens: int = 280, predict: int = 4) -> list[Result]:
    """Cold, from memory, and gone on with."""
    prompt = text(tokens, "ring")
    cold = server.generate("g2", prompt, predict=predict)
    hit = server.generate("g2", prompt, predict=predict)
    longer = prompt + hit.text + text(30, "more")
    return [cold, hit, server.generate("g2", longer, predict=predict)]


@pytest.mark.parametrize(
    ("cache", "mirror"),
    [("f16", 0), ("f16", 300), pytest.param("q8_0", 0, marks=SLOW), ("q8_0", 200)],
)
@pytest.mark.parametrize("prefetch", ["1", pytest.param("0", marks=SLOW)])
@pytest.mark.timeout(600)
def test_layers_in_pieces_answer_as_those_on_the_gpu_do(
    ring_binary: Path, models: Path, tmp_path: Path, cache: str, mirror: int, prefetch: str
) -> None:
    """A mirror ends within a piece."""
    found = []
    kind = EXACT | {"OLLAMA_KV_CACHE_TYPE": cache, "OLLAMA_PAGED_PREFETCH": prefetch}
    paged_late = paged.hot(1) | paged.mirrors(mirror) | devices(1024, **BOTH_LATE)
    for number, env in enumerate((paged.hot(LAYERS) | devices(1024), paged_late)):
        log = tmp_path / f"{number}.log"
        more = kind | {"FAKEGPU_LOG": str(log)}
        with Server(ring_binary, tmp_path / str(number), models, env=env | more) as server:
            found.append(_answers(server))
            assert ("have a mirror on CUDA0" in server.log_text()) == (number == 1 and mirror > 0)
    paged.assert_all_same(found[1], found[0])
    launched = [(tmp_path / f"{n}.log").read_text().count(": kernel pa_") for n in (0, 1)]
    assert launched[1] > launched[0], "it was no ring"


@SLOW
@pytest.mark.parametrize("mirror", [0, 200])
@pytest.mark.timeout(600)
def test_a_context_shift_of_layers_in_pieces_gives_the_same(
    ring_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, mirror: int
) -> None:
    """With tiering: see shifts.py."""
    found = []
    for hot in (LAYERS, 0):
        env = paged.hot(hot) | paged.mirrors(mirror) | EXACT | devices(1024, **BOTH_LATE)
        env |= {"OLLAMA_KV_TIER_SALT": str(hot)}
        folder = tmp_path / str(hot)
        with Server(ring_binary, folder, models, socket=sidecar.socket, env=env) as server:
            found.append(server.generate("g2", text(240, "shift"), predict=40, num_ctx=256))
            assert "context limit hit - shifting" in server.log_text()
    assert len(found[0].tokens) == 40
    assert_same(found[1], found[0])


@SLOW
@pytest.mark.parametrize("mirror", [0, 150])
@pytest.mark.timeout(900)
def test_under_four_clients_that_hang_up_every_row_is_what_one_at_a_time_would_write(
    replay_binary: Path,
    ring_binary: Path,
    models: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    mirror: int,
) -> None:
    """Forks, and rows that are written in holes between others."""
    binary = paged.with_program(ring_binary, replay_binary, tmp_path / "ollama")
    env = environment(1, 1, "5ms") | paged.hot(1) | paged.mirrors(mirror) | EXACT
    env |= {"OLLAMA_NUM_PARALLEL": 4} | devices(1024, **BOTH_LATE)
    prompts = [
        (text(70 * (number % 2), "shared") + text(220, ("storm", number)))[: 90 + 15 * number]
        for number in range(8)
    ]
    with Server(binary, tmp_path / "server", models, socket=sidecar.socket, env=env) as server:
        storm(server, prompts, 14, seed=16)
        assert paged.kv_bytes(server)["Pinned"] > 0
        assert_nothing_wrong(replay(server), tiered=True)


@pytest.mark.timeout(300)
def test_the_plan_counts_the_ring_and_not_whole_layers(
    exact_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """At 131072 cells of 1 KiB a layer's K/V take 128 MiB, two of them 256; the ring takes 64."""
    ctx, found = 131072, {}
    for name, more in (("ring", {}), ("whole", WHOLE)):
        env = paged.ON | EXACT | more | devices(MINIMUM_MIB + 330)
        with Server(exact_binary, tmp_path / name, models, env=env) as server:
            assert server.generate(eight, "a", predict=1, num_ctx=ctx).tokens
            found[name] = offloaded(server), "none is copied ahead" in server.log_text()
    print(found)
    assert found["ring"] == ((9, 9), False)
    assert found["whole"] != found["ring"]
