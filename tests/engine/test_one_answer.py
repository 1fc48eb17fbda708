"""With exact attention a text has one answer: however the prompt is cut into batches, whether its
beginning was computed, found in memory, restored, or generated and read again, whoever else is in
the batches, and wherever rows lie. All log probabilities and all K/V, bit for bit.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from tests.engine.harness import (
    BLOCK_TOKENS,
    Result,
    Server,
    Sidecar,
    in_memory,
    result_of,
    text,
)
from tests.engine.test_tiers import CASES, Case, make_sidecar
from tests.places import short_directory

EXACT = {"OLLAMA_CPU_ATTENTION": "exact"}
TOKENS, ANSWER = 1100, 24  # beyond every window, and beyond a batch
BATCHES = (512, 100, 64, 7)

# Weights: their products are other code for each. What an architecture has beside: qk-norms,
# biases, windows, sinks, experts, one row for all heads, chunks, layers that share K/V.
DTYPES = ("q8_0", "q4_k_m", "f16", "bf16", "f32")
WEIGHTS = {f"qwen3-{dtype}": ("qwen3-tiny", dtype) for dtype in DTYPES}
OTHERS = ("g5", "sliding", "sinks", "latent", "vision", "olmo", "shared", "chunks", "heads")
CACHES = [(model, "f16") for model in (*WEIGHTS, *OTHERS)]
CACHES += [(model, "q8_0") for model in ("qwen3-q8_0", "sliding", "sinks")]
SLOW = pytest.mark.slow
# One of each cache: of one kind of rows, and of windows, there are more.
AGAIN = [("g5", "f16"), ("vision", "f16"), ("olmo", "f16"), ("sliding", "q8_0")]
# What a model has beside its weights is the same whatever they are in.
OF_WEIGHTS = [(model, "f16") for model in WEIGHTS if model != "qwen3-q8_0"]


def all_but(slow: list[tuple[str, str]]) -> list[Any]:
    """Those of `slow` are the slow tests."""
    return [pytest.param(*one, marks=SLOW if one in slow else ()) for one in CACHES]


@pytest.fixture(scope="module")
def weights(binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that all tests have, and those of WEIGHTS."""
    folder = tmp_path_factory.mktemp("weights")
    shutil.copytree(models, folder / "store", copy_function=shutil.copyfile)
    with Server(binary, folder / "maker", folder / "store") as server:
        for name, (shape, dtype) in WEIGHTS.items():
            make_model(make_shape(shape, dtype=dtype), folder / "model.gguf")
            server.create(name, folder / "model.gguf")
    return folder / "store"


@pytest.fixture
def server(
    request: pytest.FixtureRequest, binary: Path, weights: Path, tmp_path: Path
) -> Iterator[Server]:
    """Without tiering; the parameter is the type of the cache."""
    env = EXACT | {"OLLAMA_KV_CACHE_TYPE": getattr(request, "param", "f16")}
    with Server(binary, tmp_path / "reference", weights, env=env) as running:
        yield running


def assert_one_answer(got: Result, expected: Result, what: object) -> None:
    assert got.text == expected.text, f"{what}: {got.text!r} instead of {expected.text!r}"
    pairs = zip(got.logprobs, expected.logprobs, strict=True)
    for step, (mine, theirs) in enumerate(pairs):
        assert mine == theirs, f"{what}: token {step} differs: {mine} instead of {theirs}"


def cold(server: Server, model: str, prompt: str, **options: int) -> Result:
    answer = in_memory(server, model, prompt, 0, **{"predict": ANSWER} | options)
    assert len(answer.logprobs) == options.get("predict", ANSWER)
    return answer


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("model", "server"), all_but(AGAIN), indirect=["server"])
def test_a_prompt_has_one_answer(need: Callable[[str], None], server: Server, model: str) -> None:
    """Cut in other batches; begun in memory; generated, and read again."""
    need(model)
    prompt = text(TOKENS, model)
    expected = cold(server, model, prompt)
    for batch in BATCHES:
        answer = server.generate(model, prompt, predict=ANSWER, num_batch=batch)
        assert answer.resumed in (0, TOKENS - 1)
        assert_one_answer(answer, expected, f"num_batch {batch}")
    assert "attention on the CPU is stock where" not in server.log_text()
    for resumed in (1, 500, TOKENS - 1):
        before = prompt[:resumed]
        server.generate(model, before + "\n" * (resumed < TOKENS - 1), predict=1)
        answer = server.generate(model, prompt, predict=ANSWER)
        assert_one_answer(answer, expected, f"from memory at {answer.resumed}")
    half = ANSWER // 2
    again = cold(server, model, prompt + expected.text[:half], predict=ANSWER - half)
    assert again.logprobs == expected.logprobs[half:]


@pytest.mark.parametrize(("model", "cache"), all_but([*AGAIN, *OF_WEIGHTS]))
def test_no_batch_is_otherwise_than_was_expected_of_the_model(
    need: Callable[[str], None],
    binary: Path,
    weights: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    model: str,
    cache: str,
) -> None:
    """A runner that finds that rows do not follow from positions alone is tiered no more."""
    need(model)
    env = EXACT | {"OLLAMA_KV_CACHE_TYPE": cache}
    with Server(binary, tmp_path / "tested", weights, socket=sidecar.socket, env=env) as server:
        server.generate(model, text(600, model), predict=3)
        report = sidecar.settle(server, model)
        assert "was expected when the model was loaded" not in server.log_text()
    assert report.tiered, report.reason
    assert report.snapshot_blocks >= 600 // BLOCK_TOKENS


@pytest.mark.parametrize("model", ["qwen3-q8_0", "qwen3-f16", "sliding"])
def test_who_else_is_in_the_batches_changes_nothing(
    binary: Path, weights: Path, server: Server, tmp_path: Path, model: str
) -> None:
    """Three slots that prefill and decode at the same time, in cells that lie in each other."""
    prompts = [text(200 + 190 * n, (model, "beside", n)) for n in range(6)]
    expected = [cold(server, model, prompt) for prompt in prompts]
    server.unload(model)
    env = EXACT | {"OLLAMA_NUM_PARALLEL": 3}
    with Server(binary, tmp_path / "busy", weights, env=env) as busy:

        def ask(prompt: str) -> Result:
            body = busy.body(model, prompt, predict=ANSWER)
            return result_of(busy.post("/api/generate", json=body), -1, 0)

        for _ in range(2):
            with ThreadPoolExecutor(3) as pool:
                for number, answer in enumerate(pool.map(ask, prompts)):
                    assert_one_answer(answer, expected[number], f"prompt {number}")
        assert len({load.slot for load in busy.loads()}) == 3


def payloads(sidecar: Sidecar) -> dict[str, str]:
    """Key of every stored block -> a digest of its rows."""
    found = {}
    for file in sidecar.block_files():
        data = file.read_bytes()
        meta = read_meta(buffer_reader(data), len(data))
        found[meta.key.hex()] = hashlib.sha256(data[meta.payload_offset :]).hexdigest()
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "model",
    [
        "qwen3-q8_0",
        pytest.param("qwen3-q4_k_m", marks=SLOW),
        "qwen3-f16",
        pytest.param("qwen3-bf16", marks=SLOW),
        "sliding",
        pytest.param("sinks", marks=SLOW),
    ],
)
def test_stored_rows_are_the_same_however_they_came_about(
    binary: Path, weights: Path, tmp_path: Path, model: str
) -> None:
    """The same namespace, the same keys and the same bytes; also of rows that were generated."""
    prompt = text(700, (model, "stored"))
    stored: list[dict[str, str]] = []
    answers: list[Result] = []
    for batch, slots in ((512, 1), (64, 1), (100, 2)):
        folder = tmp_path / f"{batch}"
        env = EXACT | {"OLLAMA_NUM_PARALLEL": slots}
        with (
            short_directory(in_memory=True) as fast,
            Sidecar(folder / "sidecar", fast) as sidecar,
            Server(binary, folder, weights, socket=sidecar.socket, env=env) as server,
        ):
            asked = prompt if batch == 512 else prompt + answers[0].text
            predict = ANSWER if batch == 512 else 1
            answers.append(server.generate(model, asked, num_batch=batch, predict=predict))
            sidecar.settle(server, model)
            server.unload(model)
            stored.append(payloads(sidecar))
    assert stored[1] == stored[2]
    both = stored[0].keys() & stored[1].keys()
    assert len(both) >= 700 // BLOCK_TOKENS  # what was generated ends a row sooner
    for key in both:
        assert stored[0][key] == stored[1][key], key


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("model", "case"),
    [("qwen3-q8_0", case) for case in CASES]
    + [("sliding", CASES[0]), ("qwen3-f16", CASES[1])]
    + [pytest.param("qwen3-bf16", CASES[0], marks=SLOW)],
    ids=lambda one: one.name if isinstance(one, Case) else one,
)
def test_a_restored_answer_is_the_cold_one(
    binary: Path, weights: Path, server: Server, tmp_path: Path, fast: Path, model: str, case: Case
) -> None:
    """Stored with one num_batch, restored with another, and computed with a third."""
    first = text(700, (model, case.name))
    said = cold(server, model, first, num_batch=300)
    prompt = first + said.text + text(60, "more")
    expected = cold(server, model, prompt, num_batch=300)
    with make_sidecar(tmp_path / "sidecar", fast, case) as sidecar:
        tested = Server(binary, tmp_path / "tested", weights, socket=sidecar.socket, env=EXACT)
        with tested:
            answer = tested.generate(model, first, predict=ANSWER, num_batch=100)
            assert_one_answer(answer, said, "first turn")
            sidecar.settle(tested, model)
            tested.stop()
            sidecar.restart()
            tested.start()
            answer = tested.generate(model, prompt, predict=ANSWER, num_batch=512)
            assert [restore.tokens for restore in tested.restores()] == [answer.resumed]
            assert answer.resumed == 700 + ANSWER - 1
            assert_one_answer(answer, expected, "restored")
