"""Mirrors: the first cells of paged layers' K/V lie on their device as well (csrc/shim/mirror.h).
On a GPU that is not there (tests/attention/fakegpu), whose streams are late by chance, answers are
the CPU's to the bit, and of what the mirrors have nothing crosses the bus.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.patchset.finished import source_of
from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import MINIMUM_MIB, devices, offloaded
from tests.engine.attention.paged import (
    BOTH_LATE,
    COMPUTING_LATE,
    COPYING_LATE,
    answers,
    cpu_answers,
)
from tests.engine.attention.test_paged_plan import ALL, SMALL
from tests.engine.harness import Server, Sidecar, assert_same, text
from tests.engine.test_alternate import differing_in_turn
from tests.engine.test_replay import assert_nothing_wrong, environment, make_prompts, replay, storm
from tests.engine.test_restore import LookupTooSlow, until_heard

LAYERS = 8
TOKEN_BYTES = 8 << 10  # of K/V, over the 8 layers
PADDING = 256  # cells: attention reads whole ones of so many
SLOW = pytest.mark.slow
TURNED_BY_THE_CPU = ("pinned.cpp", "    case GGML_OP_CPY:\n", "")
WRITTEN_ONCE = ("attention.cpp", "part_of(graph, both, 2)", "part_of(graph, both, 1)")


@pytest.mark.parametrize("late", [BOTH_LATE, pytest.param(COPYING_LATE, marks=SLOW)], ids=str)
@pytest.mark.parametrize("prefetch", ["1", pytest.param("0", marks=SLOW)])
@pytest.mark.parametrize(
    "cells", [pytest.param(300, marks=SLOW), 512, pytest.param(None, marks=SLOW)]
)
@pytest.mark.timeout(300)
def test_layers_with_mirrors_answer_as_the_cpu_does(
    paged_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    cells: int | None,
    prefetch: str,
    late: dict[str, object],
) -> None:
    """Conversations of 700 tokens and more, in batches of 512: below a mirror's end and above."""
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", eight, "mirror")
    env = paged.hot(2) | paged.mirrors(cells) | {"OLLAMA_PAGED_PREFETCH": prefetch}
    with Server(paged_binary, tmp_path / "gpu", models, env=env | devices(1024, **late)) as server:
        found = answers(server, eight, "mirror")
        assert "K and V of layers have a mirror on CUDA0" in server.log_text()
    paged.assert_all_same(found, expected)


@pytest.mark.timeout(300)
def test_a_conversation_that_grows_across_the_end_of_its_mirrors_answers_as_the_cpu_does(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """A batch writes on both sides of it, and what it wrote below is read in the next request."""
    found = []
    mine = paged.hot(0) | paged.mirrors(512) | devices(1024, **BOTH_LATE)
    for number, env in enumerate((paged.CPU, mine)):
        with Server(paged_binary, tmp_path / str(number), models, env=env) as server:
            prompt = text(200, "grows")
            found.append([server.generate(eight, prompt, predict=1)])
            for more in (400, 20, 20):
                prompt += text(more, ("more", more))
                found[-1].append(server.generate(eight, prompt, predict=8))
    paged.assert_all_same(found[1], found[0])


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        ("g2", "q8_0"),
        ("sliding", "f16"),
        *(pytest.param(name, "f16", marks=SLOW) for name in ("sinks", "latent", "chunks", "olmo")),
    ],
)
@pytest.mark.timeout(300)
def test_mirrors_of_other_models_answer_as_the_cpu_does(
    paged_binary: Path, models: Path, tmp_path: Path, model: str, cache: str
) -> None:
    kind = {"OLLAMA_KV_CACHE_TYPE": cache}
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", model, "mirror", **kind)
    env = kind | paged.hot(0) | paged.mirrors(512) | devices(1024, **COMPUTING_LATE)
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = answers(server, model, "mirror")
    paged.assert_all_same(found, expected, (model, cache))


@pytest.mark.timeout(300)
def test_a_chat_that_its_mirrors_hold_sends_nothing_over_the_bus(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """Each cell crosses it once, when it is seen for the first time."""
    log = tmp_path / "devices.log"
    env = paged.hot(0) | paged.mirrors() | devices(1024, LOG=str(log))
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        prompt = text(100, "short")
        assert server.generate(eight, prompt, predict=1, num_ctx=16384).tokens
        before = paged.staged_bytes(log)
        assert before == PADDING * TOKEN_BYTES
        answer = server.generate(eight, prompt, predict=60, num_ctx=16384)
        assert len(answer.tokens) == 60
        assert paged.staged_bytes(log) == before


@pytest.mark.timeout(300)
def test_of_a_longer_conversation_only_the_rest_crosses_the_bus(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    copied = {}
    for cells in (0, 512):
        log = tmp_path / f"{cells}.log"
        env = paged.hot(0) | paged.mirrors(cells) | devices(1024, LOG=str(log))
        with Server(paged_binary, tmp_path / str(cells), models, env=env) as server:
            prompt = text(900, "long")
            server.generate(eight, prompt, predict=1)
            before = paged.staged_bytes(log)
            assert len(server.generate(eight, prompt, predict=20).tokens) == 20
            copied[cells] = paged.staged_bytes(log) - before
    batches = copied[0] // (1024 * TOKEN_BYTES)
    assert batches in (20, 21)  # one may have been built ahead
    assert copied[0] == batches * 1024 * TOKEN_BYTES
    assert copied[512] in (20 * 512 * TOKEN_BYTES, 21 * 512 * TOKEN_BYTES)


@pytest.mark.parametrize("prefetch", ["1", pytest.param("0", marks=SLOW)])
@pytest.mark.timeout(300)
def test_a_context_shift_of_layers_with_mirrors_answers_as_on_the_cpu(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path, sidecar: Sidecar, prefetch: str
) -> None:
    found = []
    mine = paged.hot(2) | paged.mirrors() | {"OLLAMA_PAGED_PREFETCH": prefetch}
    for number, env in enumerate((paged.CPU, mine | devices(1024, **COMPUTING_LATE))):
        folder = tmp_path / str(number)
        with Server(paged_binary, folder, models, socket=sidecar.socket, env=env) as server:
            found.append(server.generate(eight, text(480, "shift"), predict=60, num_ctx=512))
            assert "context limit hit - shifting" in server.log_text()
    assert len(found[0].tokens) == 60
    assert_same(found[1], found[0])


@pytest.mark.timeout(300)
def test_a_shift_that_the_shim_does_not_see_is_not_missed(
    binary: Path, gpu_binary: Path, models: Path, eight: str, tmp_path: Path, sidecar: Sidecar
) -> None:
    """As where a device cannot turn K, and the CPU does it: only the count of writes tells."""
    blind = paged.install(gpu_binary, source_of(binary), tmp_path / "blind", TURNED_BY_THE_CPU)
    found = []
    for number, env in enumerate((paged.CPU, paged.hot(0) | paged.mirrors() | devices(1024))):
        folder = tmp_path / str(number)
        with Server(blind, folder, models, socket=sidecar.socket, env=env) as server:
            found.append(server.generate(eight, text(480, "shift"), predict=60, num_ctx=512))
            assert "context limit hit - shifting" in server.log_text()
    assert_same(found[1], found[0])


@pytest.mark.parametrize("cells", [600, pytest.param(None, marks=SLOW)])
@pytest.mark.timeout(300)
def test_what_is_restored_over_other_rows_is_in_the_mirror_too(
    paged_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    sidecar: Sidecar,
    cells: int | None,
) -> None:
    """Of two conversations in turn the second leaves its rows in the mirror, below those of the
    first that come back.
    """

    def check(attempt: int) -> None:
        first, second = (text(700, (name, attempt)) for name in ("first", "second"))
        env = paged.hot(1) | paged.mirrors(cells) | devices(1024, **BOTH_LATE)
        folder = tmp_path / str(attempt)
        with Server(paged_binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate(eight, first)
            hit = server.generate(eight, first)
            server.generate(eight, second)
            sidecar.settle(server, eight)
            pauses = server.pauses()
            again = server.generate(eight, first)
            restored = sum(restore.tokens for restore in server.restores())
            if restored == 0 and server.pauses() > pauses:
                raise LookupTooSlow
            assert restored == len(first) - 1
            assert_same(again, hit)

    until_heard(check)


@pytest.mark.parametrize("cells", [280, pytest.param(None, marks=SLOW)])
@pytest.mark.timeout(300)
def test_prompts_that_take_turns_on_mirrored_layers_get_their_in_memory_answers(
    paged_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, cells: int | None
) -> None:
    env = paged.hot(3) | paged.mirrors(cells) | devices(1024, DELAY_US=5000, SEED=7)
    assert differing_in_turn(paged_binary, models, tmp_path, sidecar, 1, 4, env) == []


@pytest.mark.timeout(400)
def test_under_clients_that_hang_up_rows_of_mirrored_layers_are_what_one_at_a_time_would_write(
    replay_binary: Path, paged_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """Four slots whose cells lie below the mirrors' end and above, forks and restores."""
    binary = paged.with_program(paged_binary, replay_binary, tmp_path / "ollama")
    env = environment(1, 1, "5ms") | paged.hot(1) | paged.mirrors(700) | {"OLLAMA_NUM_PARALLEL": 4}
    env |= devices(1024, **BOTH_LATE)
    with Server(binary, tmp_path / "server", models, socket=sidecar.socket, env=env) as server:
        storm(server, make_prompts(16), 24, seed=17)
        assert "have a mirror" in server.log_text()
        assert_nothing_wrong(replay(server), tiered=True)


@pytest.mark.timeout(400)
def test_kernels_of_our_own_read_mirrors_with_the_same_bits(
    exact_binary: Path, models: Path, tmp_path: Path
) -> None:
    found = []
    for cells in (0, 128, None):
        env = paged.hot(1) | paged.EXACT | paged.mirrors(cells) | devices(1024, **BOTH_LATE)
        with Server(exact_binary, tmp_path / str(cells), models, env=env) as server:
            prompt = text(140, "exact")
            found.append([server.generate("g2", prompt, predict=6) for _ in range(2)])
            assert ("have a mirror" in server.log_text()) == (cells != 0)
            assert "does not serve" not in server.log_text()
    for other in found[1:]:
        paged.assert_all_same(other, found[0])


@pytest.mark.timeout(300)
def test_two_devices_have_mirrors_of_their_own_layers(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", eight, "mirror")
    env = paged.hot(0) | paged.mirrors(512) | devices(1024, 1024, **COMPUTING_LATE)
    env |= {"OLLAMA_SCHED_SPREAD": "1"}
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = answers(server, eight, "mirror")
        log = server.log_text()
    assert "have a mirror on CUDA0" in log
    assert "have a mirror on CUDA1" in log
    paged.assert_all_same(found, expected)


@pytest.mark.timeout(400)
def test_with_mirrors_all_layers_are_paged_that_may_be_and_a_short_chat_costs_nothing(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """At 32768 cells K/V of a layer take 32 MiB, and some layers would fit the device."""
    layer_bytes = 32 << 20
    pinned, copied = [], []
    limited = {"OLLAMA_PAGED_HOST_GB": "0.23"}  # seven layers
    for number, more in enumerate((paged.mirrors(0), paged.mirrors(), limited | paged.mirrors())):
        log = tmp_path / f"{number}.log"
        env = paged.ON | more | devices(SMALL + 64, LOG=str(log))
        with Server(paged_binary, tmp_path / str(number), models, env=env) as server:
            prompt = text(100, "plan")
            server.generate(eight, prompt, predict=1, num_ctx=32768)
            before = paged.staged_bytes(log)
            assert len(server.generate(eight, prompt, predict=20, num_ctx=32768).tokens) == 20
            copied.append(paged.staged_bytes(log) - before)
            pinned.append(paged.kv_bytes(server)["Pinned"])
            assert offloaded(server) == ALL
    assert pinned[0] < pinned[2] == 7 * layer_bytes
    assert pinned[1] == 8 * layer_bytes
    assert copied[0] > 0 == copied[1] == copied[2]


@pytest.mark.timeout(400)
def test_mirrors_take_what_the_plan_leaves_and_move_no_layer(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """At 65536 cells there is room for staging of one layer, or of two, and for little else."""
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", eight, "plan")
    for vram_mib in (MINIMUM_MIB + 180, MINIMUM_MIB + 243):
        env = paged.ON | paged.mirrors() | devices(vram_mib, **BOTH_LATE)
        with Server(paged_binary, tmp_path / str(vram_mib), models, env=env) as server:
            found = answers(server, eight, "plan", num_ctx=65536)
            assert offloaded(server) == ALL
            assert "have a mirror" in server.log_text()
        paged.assert_all_same(found, expected)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("cells", "said_of_mirrors"),
    [(256, "no memory on CUDA0 for mirrors"), (512, "have a mirror on CUDA0")],  # half of 512
)
def test_without_memory_for_mirrors_the_model_is_loaded_with_fewer_or_none(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path, cells: int, said_of_mirrors: str
) -> None:
    """The first allocation of a mirror fails; what else is allocated does not."""
    log = tmp_path / "devices.log"
    env = paged.hot(0) | paged.mirrors(cells) | devices(1024, LOG=str(log))
    with Server(paged_binary, tmp_path / "one", models, env=env) as server:
        expected = server.generate(eight, text(300, "none"))
    size = cells * TOKEN_BYTES
    said = log.read_text(encoding="utf-8").splitlines()
    mirror = [line for line in said if f" of {size} bytes" in line]
    assert len(mirror) == 1, mirror
    number = mirror[0].split("allocation ")[1].split()[0]
    env |= devices(1024, LOG=str(log), FAIL_ALLOC=number)
    with Server(paged_binary, tmp_path / "other", models, env=env) as server:
        found = server.generate(eight, text(300, "none"))
        assert said_of_mirrors in server.log_text()
        assert offloaded(server) == (LAYERS + 1, LAYERS + 1)
    assert_same(found, expected)


@pytest.mark.timeout(300)
def test_a_mirror_that_new_rows_do_not_reach_gives_other_answers(
    binary: Path, gpu_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """Else the tests above would prove nothing of it."""
    wrong = paged.install(gpu_binary, source_of(binary), tmp_path / "wrong", WRITTEN_ONCE)
    expected = cpu_answers(wrong, models, tmp_path / "cpu", eight, "mirror")
    env = paged.hot(0) | paged.mirrors() | devices(1024)
    with Server(wrong, tmp_path / "gpu", models, env=env) as server:
        try:
            found = answers(server, eight, "mirror")
        except AssertionError:  # NaN can end a request
            return
    with pytest.raises(AssertionError):
        paged.assert_all_same(found, expected)
