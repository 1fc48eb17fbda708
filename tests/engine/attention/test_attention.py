"""Exact attention on the CPU inside the patched Ollama: what it serves, what it must not change.

Its numbers are tested against f64 at the operation itself (`op/attention_op.cpp`, built from the
patched tree's own GGML) and, as a whole, by a model that retrieves (`retrieval.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from ollama_tiering import config
from ollama_tiering.patchset.finished import source_of
from tests.engine.attention import retrieval
from tests.engine.harness import Server, Sidecar, in_memory, text

EXACT = {"OLLAMA_CPU_ATTENTION": "exact"}
SAYS_EXACT = "attention on the CPU is exact ("
SAYS_STOCK = "attention on the CPU is stock where"
SAYS_FLASH = "enabling flash attention"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OP = Path(__file__).parent / "op"
NEEDLE_TOKENS = 16384
FEWER_TOKENS = 4096
PATIENCE = httpx.Timeout(900)  # seconds; on a quiet machine the longest answer takes a few


@pytest.fixture(scope="session")
def operations(binary: Path) -> Path:
    """The test programs on the CPU backend of the binary's own tree; kept in the cache."""
    cmake, tree = shutil.which("cmake"), source_of(binary)
    if cmake is None or not (tree / "ml/backend/ggml/ggml/src/ggml-cpu/exactattn.cpp").is_file():
        pytest.skip(f"needs cmake and the patched source tree of the binary ({tree})")
    folder = config.cache_dir() / "op-test" / tree.parent.name / "build"
    # CMake refuses a build folder whose sources lie elsewhere, and the next run may be another
    # clone's. A copy with the time of now, so that it is compiled anew: seconds.
    sources = folder.with_name("source")
    shutil.copytree(OP, sources, copy_function=shutil.copyfile, dirs_exist_ok=True)
    jobs = ["--parallel", str(os.cpu_count())]
    for command in (
        [cmake, "-S", sources, "-B", folder, f"-DTREE={tree}"],
        [cmake, "--build", folder, "--target", "attention_op", "columns_op", *jobs],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def _run(program: Path, mode: str) -> None:
    """Its own words say what each mode checks: the beginning of its source."""
    env = os.environ | {"OLLAMA_CPU_ATTENTION": "stock" if mode == "stock" else "exact"}
    done = subprocess.run([program, mode], env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["exact", "repeat", "stock"])
def test_the_operation_in_the_patched_backend(operations: Path, mode: str) -> None:
    _run(operations / "attention_op", mode)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["exact", "stock"])
def test_a_column_has_the_same_bits_alone_and_beside_others(operations: Path, mode: str) -> None:
    _run(operations / "columns_op", mode)


@pytest.mark.parametrize("model", ["g2", "g5", "sliding", "sinks", "llama"])
def test_every_shape_is_served_and_answers_as_stock_without_flash_attention(
    binary: Path, models: Path, tmp_path: Path, model: str
) -> None:
    """Without flash attention stock's sums are in f32: only roundings are left between the two."""
    prompt = text(300, model)
    plain = {"OLLAMA_FLASH_ATTENTION": 0}
    with Server(binary, tmp_path / "plain", models, env=plain) as server:
        expected = server.generate(model, prompt).logprobs[0]
    with Server(binary, tmp_path / "exact", models, env=EXACT) as server:
        answer = server.generate(model, prompt).logprobs[0]
        log = server.log_text()
    assert SAYS_EXACT in log
    assert SAYS_STOCK not in log
    assert answer.token == expected.token
    mine, theirs = dict(answer.top), dict(expected.top)
    assert len(mine.keys() & theirs.keys()) >= len(theirs) - 1
    for token in mine.keys() & theirs.keys():
        assert mine[token] == pytest.approx(theirs[token], abs=0.05), token


@pytest.mark.parametrize(("cache", "apart"), [("q8_0", 0.1), ("q4_0", 1.0)])
def test_quantised_caches_are_served(
    binary: Path, models: Path, tmp_path: Path, cache: str, apart: float
) -> None:
    """`apart`: how far a log probability may be from that with rows in f16; rounding, not sums."""
    prompt = text(300, cache)
    first = {}
    for kind in ("f16", cache):
        env = EXACT | {"OLLAMA_KV_CACHE_TYPE": kind}
        with Server(binary, tmp_path / kind, models, env=env) as server:
            first[kind] = server.generate("g2", prompt).logprobs[0]
            log = server.log_text()
        assert SAYS_EXACT in log
        assert SAYS_STOCK not in log
    assert first[cache] != first["f16"]
    assert dict(first[cache].top)[first["f16"].token] == pytest.approx(
        first["f16"].logprob, abs=apart
    )


def _cold(server: Server, prompt: str) -> list[object]:
    answer = in_memory(server, "g2", prompt, 0)
    assert answer.resumed == 0
    return [answer.text, answer.logprobs]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_the_same_request_gives_the_same_bits_each_time_and_with_every_number_of_threads(
    binary: Path, models: Path, tmp_path: Path, times: int
) -> None:
    """All of an answer's log probabilities: prefill in two batches, then decode."""
    prompt = text(700, "again")
    seen: list[list[object]] = []
    for threads in (1, 2):
        folder = tmp_path / str(threads)
        with Server(binary, folder, models, env=EXACT, threads=threads) as server:
            server.http.timeout = PATIENCE
            seen += [_cold(server, prompt) for _ in range(times)]
    assert all(answer == seen[0] for answer in seen)


@pytest.mark.parametrize(
    ("attention", "flash", "on"),
    [("exact", None, True), ("exact", "0", False), ("stock", None, False), ("Exact", None, False)],
)
def test_flash_attention_comes_with_it_unless_the_user_says_no(
    binary: Path, models: Path, tmp_path: Path, attention: str, flash: str | None, on: bool
) -> None:
    """llama is one of the models that have it off by default."""
    env = {"OLLAMA_NEW_ENGINE": "1", "OLLAMA_CPU_ATTENTION": attention}
    env |= {"OLLAMA_FLASH_ATTENTION": flash} if flash else {}
    with Server(binary, tmp_path, models, env=env) as server:
        server.generate("llama", text(100, "flash"), predict=1)
        log = server.log_text()
    assert (SAYS_FLASH in log) == on
    assert (SAYS_EXACT in log) == on
    assert ("invalid environment variable" in log) == (attention == "Exact")


def test_status_says_how_attention_is_computed(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    found = {}
    for name, env in (("exact", EXACT), ("off", EXACT | {"OLLAMA_FLASH_ATTENTION": "0"})):
        with Server(binary, tmp_path / name, models, socket=sidecar.socket, env=env) as server:
            server.generate("g2", text(100, name))
            found[name] = sidecar.settle(server, "g2").cpu_attention
    assert found["exact"].startswith("exact (")
    assert found["off"] == "stock (flash attention is off)"


@pytest.mark.parametrize(("attention", "huge"), [("exact", True), ("stock", False)])
def test_kv_is_in_huge_pages_where_attention_is_exact(
    binary: Path, models: Path, tmp_path: Path, attention: str, huge: bool
) -> None:
    """K and V of a layer are 8 MiB each: some huge pages lie in them wherever they begin."""
    setting = HUGE_PAGES.read_text() if HUGE_PAGES.exists() else "no such setting"
    if "[madvise]" not in setting and not ("[always]" in setting and attention == "exact"):
        pytest.skip(f"huge pages are not for who asks for them: {HUGE_PAGES}: {setting.strip()}")
    env = {"OLLAMA_CPU_ATTENTION": attention, "OLLAMA_FLASH_ATTENTION": "1"}
    with Server(binary, tmp_path, models, env=env) as server:
        server.generate("g2", text(100, "pages"), predict=1, num_ctx=32768)
        pid = server.runner_pid("g2")
        memory = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (kilobytes,) = re.findall(r"^AnonHugePages: +(\d+) kB", memory, re.MULTILINE)
    assert (int(kilobytes) > 0) == huge


def test_what_one_attention_stored_is_not_restored_under_another(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = text(300, "whose")
    restored = {}
    for number, attention in enumerate(("exact", "stock", "exact")):
        env = {"OLLAMA_CPU_ATTENTION": attention, "OLLAMA_FLASH_ATTENTION": "1"}
        folder = tmp_path / str(number)
        with Server(binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate("g2", prompt)
            sidecar.settle(server, "g2")
            restored[number] = sum(restore.tokens for restore in server.restores())
    assert restored[0] == 0
    assert restored[1] == 0
    assert restored[2] >= 256


@pytest.fixture(scope="session")
def retrieving(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Server]:
    """Starts a server that has the model which retrieves."""
    folder = tmp_path_factory.mktemp("retrieval")
    with Server(binary, folder / "maker", folder / "store") as server:
        retrieval.write(folder / "retrieval.gguf")
        server.create("retrieval", folder / "retrieval.gguf")
    return lambda at: Server(binary, at, folder / "store", env=EXACT, threads=os.cpu_count() or 1)


def _retrieve(server: Server, needle_at: int, seed: int, tokens: int = NEEDLE_TOKENS) -> None:
    prompt, answer = retrieval.prompt(tokens, needle_at, seed)
    server.http.timeout = PATIENCE
    options = {"num_ctx": retrieval.CTX, "predict": 1}
    (step,) = server.generate("retrieval", prompt, **options).logprobs
    expected = retrieval.reference(prompt)
    assert max(expected, key=expected.__getitem__) == answer
    assert step.token == answer
    assert step.logprob == pytest.approx(expected[answer], abs=0.01)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tokens", [FEWER_TOKENS, pytest.param(NEEDLE_TOKENS, marks=pytest.mark.slow)]
)
def test_a_needle_is_found_as_by_attention_in_f64(
    retrieving: Callable[[Path], Server], tmp_path: Path, tokens: int
) -> None:
    with retrieving(tmp_path) as server:
        _retrieve(server, tokens // 3, 1, tokens)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_needles_at_16k_are_found_wherever_they_are(
    retrieving: Callable[[Path], Server], tmp_path: Path
) -> None:
    with retrieving(tmp_path) as server:
        for seed, depth in enumerate([0, 1, 40, 511, 512, 4095, 9000, 12000, 15000, 16000, 16380]):
            _retrieve(server, depth, seed + 2)
