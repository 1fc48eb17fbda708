"""OLLAMA_PAGED_ENGINE=exact in Ollama: attention of a model on a GPU by csrc's own kernels. The GPU
is not there, and runs their code in an emulation (tests/attention/fakegpu/driver). That is slow, so
that prompts are short; operation by operation: test_exact_op.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import computed, devices, offloaded
from tests.engine.attention.paged import BOTH_LATE, EXACT
from tests.engine.harness import Result, Server, Sidecar, assert_same, text
from tests.engine.namespaces import descriptions, only_parts, parts
from tests.engine.test_replay import assert_nothing_wrong, environment, replay, storm
from tests.engine.test_restore import LookupTooSlow, until_heard

LAYERS = 4  # of g2
PROMPT_TOKENS = 140
PREDICT = 6
SLOW = pytest.mark.slow


def _answers(server: Server, model: str, seed: object, tokens: int = PROMPT_TOKENS) -> list[Result]:
    """Cold, from memory, and gone on with."""
    prompt = text(tokens, seed)
    cold = server.generate(model, prompt, predict=PREDICT)
    hit = server.generate(model, prompt, predict=PREDICT)
    longer = prompt + hit.text + text(30, ("more", seed))
    return [cold, hit, server.generate(model, longer, predict=PREDICT)]


@pytest.mark.timeout(400)
def test_all_attention_on_the_gpu_is_its_own_wherever_k_and_v_lie(
    exact_binary: Path, models: Path, tmp_path: Path
) -> None:
    """Close to what engine 1 computes, and not the same: its sums are others."""
    found = []
    for number, (hot, late) in enumerate([(LAYERS, {}), (1, BOTH_LATE), (0, {"DELAY_US": 2000})]):
        log = tmp_path / f"{number}.log"
        env = paged.hot(hot) | EXACT | devices(1024, LOG=str(log), **late)
        with Server(exact_binary, tmp_path / str(number), models, env=env) as server:
            found.append(_answers(server, "g2", "exact"))
            assert offloaded(server) == (LAYERS + 1, LAYERS + 1)
            assert "computes attention by kernels of its own, exact." in server.log_text()
            assert "does not serve" not in server.log_text()
            assert (paged.kv_bytes(server).get("Pinned", 0) > 0) == (hot < LAYERS)
        said = log.read_text(encoding="utf-8")
        assert computed(said.splitlines()) == {0: 0}, "no attention is GGML's"
        for kernel in ("pa_decode", "pa_wide", "pa_combine"):
            assert f"kernel {kernel} " in said
    for other in found[1:]:
        paged.assert_all_same(other, found[0])
    env = paged.hot(1) | devices(1024)
    with Server(exact_binary, tmp_path / "stock", models, env=env) as server:
        stock = _answers(server, "g2", "exact")
    assert stock[0].logprobs != found[0][0].logprobs
    for mine, theirs in zip(found[0], stock, strict=True):
        assert mine.logprobs[0].logprob == pytest.approx(theirs.logprobs[0].logprob, abs=0.05)


@pytest.mark.parametrize(
    "model",
    [
        "sinks",
        "sliding256",  # as gemma3's heads, of 256 values
        pytest.param("sliding", marks=SLOW),
        pytest.param("g5", marks=SLOW),
    ],
)
@pytest.mark.timeout(400)
def test_sinks_windows_long_heads_and_groups_of_five_are_served(
    exact_binary: Path, models: Path, tmp_path: Path, model: str
) -> None:
    found = []
    for hot in (6, 0):
        log = tmp_path / f"{hot}.log"
        env = paged.hot(hot) | EXACT | devices(1024, LOG=str(log))
        with Server(exact_binary, tmp_path / str(hot), models, env=env) as server:
            tokens = 60 if model == "sliding256" else PROMPT_TOKENS
            found.append(_answers(server, model, "models", tokens))
            assert "does not serve" not in server.log_text()
        assert computed(log.read_text(encoding="utf-8").splitlines()) == {0: 0}
    paged.assert_all_same(found[1], found[0])


@pytest.mark.timeout(400)
def test_k_and_v_in_q8_0_are_served_wherever_they_lie(
    exact_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """A namespace says of which type K/V are."""
    found = []
    for hot, late in ((LAYERS, {}), (1, BOTH_LATE)):
        log = tmp_path / f"{hot}.log"
        env = paged.hot(hot) | EXACT | devices(1024, LOG=str(log), **late)
        env |= {"OLLAMA_KV_CACHE_TYPE": "q8_0", "OLLAMA_KV_TIER_SALT": str(hot)}
        folder = tmp_path / str(hot)
        with Server(exact_binary, folder, models, socket=sidecar.socket, env=env) as server:
            found.append(_answers(server, "g2", "q8_0"))
            assert "does not serve" not in server.log_text()
            assert (paged.kv_bytes(server).get("Pinned", 0) > 0) == (hot < LAYERS)
            sidecar.settle(server, "g2")
        said = log.read_text(encoding="utf-8")
        assert computed(said.splitlines()) == {0: 0}, "no attention is GGML's"
    paged.assert_all_same(found[1], found[0])
    assert {name["cache_dtype"] for name in descriptions(sidecar)} == {"q8_0"}
    with Server(
        exact_binary, tmp_path / "f16", models, env=paged.hot(1) | EXACT | devices(1024)
    ) as server:
        assert _answers(server, "g2", "q8_0")[0].logprobs != found[0][0].logprobs


@pytest.mark.timeout(300)
def test_each_of_two_devices_runs_the_kernels_of_its_own_layers(
    exact_binary: Path, models: Path, tmp_path: Path
) -> None:
    """What lies on another device, a kernel cannot touch: that is a fault of the fake GPU."""
    found = []
    for count in (1, 2):
        log = tmp_path / f"{count}.log"
        env = paged.hot(1) | EXACT | {"OLLAMA_SCHED_SPREAD": "1"}
        env |= devices(*[1024] * count, LOG=str(log))
        with Server(exact_binary, tmp_path / str(count), models, env=env) as server:
            found.append(server.generate("g2", text(60, "two"), predict=3))
        said = log.read_text(encoding="utf-8")
        for number in range(count):
            assert f"device {number}: kernel pa_decode " in said
    assert_same(found[1], found[0])


@pytest.mark.timeout(300)
def test_what_it_does_not_serve_engine_1_computes_and_says_so_once(
    exact_binary: Path, models: Path, tmp_path: Path
) -> None:
    kind = {"OLLAMA_KV_CACHE_TYPE": "q4_0"}
    with Server(exact_binary, tmp_path / "cpu", models, env=paged.CPU | kind) as server:
        expected = _answers(server, "g2", "falls back")
    env = kind | paged.hot(1) | EXACT | devices(1024)
    with Server(exact_binary, tmp_path / "gpu", models, env=env) as server:
        found = _answers(server, "g2", "falls back")
        said = server.log_text()
    assert said.count("no kernels for its heads: sm_89-64x64-q4_0-q4_0-rows2-align4.cubin") == 1
    paged.assert_all_same(found, expected)


@pytest.mark.parametrize("engine", [{}, {"OLLAMA_PAGED_ENGINE": "stock"}], ids=str)
@pytest.mark.timeout(300)
def test_unset_or_stock_it_is_engine_1(
    exact_binary: Path, models: Path, tmp_path: Path, engine: dict[str, str]
) -> None:
    expected = paged.cpu_answers(exact_binary, models, tmp_path / "cpu", "g2", "unset")
    log = tmp_path / "devices.log"
    env = paged.hot(1) | engine | devices(1024, LOG=str(log))
    with Server(exact_binary, tmp_path / "gpu", models, env=env) as server:
        found = paged.answers(server, "g2", "unset")
    paged.assert_all_same(found, expected)
    assert "kernel pa_" not in log.read_text(encoding="utf-8")


@pytest.mark.timeout(400)
def test_what_it_computed_is_restored_wherever_it_lay_with_the_bits_of_an_in_memory_hit(
    exact_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    def check(attempt: int) -> None:
        prompt = text(PROMPT_TOKENS, ("tiers", attempt))
        answers = []
        for number, hot in enumerate((1, LAYERS, 0)):
            env = paged.hot(hot) | EXACT | devices(1024, **BOTH_LATE)
            folder = tmp_path / f"{attempt}-{number}"
            with Server(exact_binary, folder, models, socket=sidecar.socket, env=env) as server:
                pauses = server.pauses()
                first = server.generate("g2", prompt, predict=PREDICT)
                restored = sum(restore.tokens for restore in server.restores())
                if number and restored == 0 and server.pauses() > pauses:
                    raise LookupTooSlow
                hit = server.generate("g2", prompt, predict=PREDICT)
                answers += [hit] if number == 0 else [first, hit]
                assert restored == (PROMPT_TOKENS - 1 if number else 0)
                sidecar.settle(server, "g2")
        for answer in answers[1:]:
            assert_same(answer, answers[0])

    until_heard(check)
    computed_by = only_parts(sidecar)
    assert computed_by["paged"].startswith("exact.")
    assert computed_by["rows"] == "0000"


@pytest.mark.timeout(400)
def test_the_engines_never_share_a_block(
    exact_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = text(PROMPT_TOKENS, "engines")
    restored = []
    for number, engine in enumerate(({}, EXACT, {}, EXACT)):
        env = paged.hot(0) | engine | devices(1024)
        folder = tmp_path / str(number)
        with Server(exact_binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate("g2", prompt, predict=1)
            assert server.pauses() == 0
            restored.append(sum(restore.tokens for restore in server.restores()))
            sidecar.settle(server, "g2")
    assert restored == [0, 0, PROMPT_TOKENS - 1, PROMPT_TOKENS - 1]
    with_engine = ["paged" in parts(name) for name in descriptions(sidecar)]
    assert sorted(with_engine) == [False, True]


@pytest.mark.timeout(300)
def test_a_launch_that_fails_ends_the_request_with_an_error_and_is_said(
    exact_binary: Path, models: Path, tmp_path: Path
) -> None:
    env = paged.hot(1) | EXACT | devices(1024, FAIL_LAUNCH=12)
    with Server(exact_binary, tmp_path / "server", models, env=env) as server:
        with pytest.raises(AssertionError, match="500"):
            server.generate("g2", text(20, "fails"), predict=4)
        said = server.log_text()
    assert "failed on CUDA0: cuLaunchKernel: unspecified launch failure (719)" in said
    assert "error computing ggml graph" in said


@SLOW
@pytest.mark.timeout(600)
def test_a_context_shift_gives_the_same_wherever_k_and_v_lie(
    exact_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """K is turned where it lies. With tiering (see shifts.py), and blocks of each server's own."""
    found = []
    for hot in (LAYERS, 1, 0):
        env = paged.hot(hot) | EXACT | devices(1024, **BOTH_LATE)
        env |= {"OLLAMA_KV_TIER_SALT": str(hot)}
        folder = tmp_path / str(hot)
        with Server(exact_binary, folder, models, socket=sidecar.socket, env=env) as server:
            found.append(server.generate("g2", text(240, "shift"), predict=40, num_ctx=256))
            assert "context limit hit - shifting" in server.log_text()
    assert len(found[0].tokens) == 40
    paged.assert_all_same(found[1:], [found[0]] * 2)


@SLOW
@pytest.mark.timeout(900)
def test_under_four_clients_that_hang_up_every_row_is_what_one_at_a_time_would_write(
    replay_binary: Path, exact_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """As in test_paged_slots.py, of shorter prompts."""
    binary = paged.with_program(exact_binary, replay_binary, tmp_path / "ollama")
    env = environment(1, 1, "5ms") | paged.hot(1) | EXACT | {"OLLAMA_NUM_PARALLEL": 4}
    env |= devices(1024, **BOTH_LATE)
    lengths = (90, 110, 130, 150, 170, 190, 200, 210)
    prompts = [
        (text(70 * (number % 2), "shared") + text(220, ("storm", number)))[:length]
        for number, length in enumerate(lengths)
    ]
    with Server(binary, tmp_path / "server", models, socket=sidecar.socket, env=env) as server:
        storm(server, prompts, 14, seed=16)
        assert paged.kv_bytes(server)["Pinned"] > 0
        assert_nothing_wrong(replay(server), tiered=True)
