"""The reference engine: right numbers, rows that outlive it, and never a wrong token."""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ollama_tiering.engines.reference_engine import BLOCK_TOKENS, ReferenceEngine, Result
from ollama_tiering.errors import ServiceError, UsageError
from ollama_tiering.models import vocab
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from ollama_tiering.store.block.key import Namespace

PROMPT = "".join(chr(32 + (i * i + 7 * i) % 95) for i in range(200))

# Stock Ollama v0.16.3 (Go engine, CPU, flash attention off): qwen3-tiny, seed 7, PROMPT, greedy.
STOCK_TEXT = "Z'OJq}ej~j~j~j~j"
STOCK_TOP = [
    [(90, -0.9726), (80, -2.0669), (84, -2.1538)],
    [(39, -0.0606), (71, -3.8224), (104, -4.6171)],
    [(79, -1.3773), (94, -1.433), (122, -2.1318)],
    [(74, -1.5572), (63, -1.6077), (44, -1.6094)],
]

Segments = Mapping[tuple[int, str], NDArray[np.float16]]


@dataclass
class FakeBlock:
    tokens: list[int]
    rows: int
    data: dict[tuple[int, str], bytes]

    def segment(self, layer: int, kind: str) -> bytes:
        return self.data[layer, kind]


@dataclass
class FakeMatch:
    rows: int = 0
    blocks: list[FakeBlock] = field(default_factory=list)


class FakeStore:
    """The block client's interface over a dict: whole blocks, then the best tail."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, tuple[int, ...]], list[FakeBlock]] = {}

    def match(self, ns: Namespace, tokens: Sequence[int]) -> FakeMatch:
        found = FakeMatch()
        while True:
            here = self.blocks.get((ns.digest(), tuple(tokens[: found.rows])), [])
            rest = list(tokens[found.rows :])
            scored = [(_common(b.tokens, rest), b) for b in here]
            rows, block = max(scored, key=lambda s: s[0], default=(0, None))
            if not rows or block is None:
                return found
            found.rows += rows
            found.blocks.append(FakeBlock(block.tokens, rows, block.data))
            if rows < BLOCK_TOKENS:
                return found

    def get(self, ns: Namespace, match: FakeMatch) -> list[FakeBlock]:
        return match.blocks

    def put(
        self, ns: Namespace, tokens: Sequence[int], segments_of: Callable[[int], Segments]
    ) -> None:
        for index, first in enumerate(range(0, len(tokens), BLOCK_TOKENS)):
            inside = list(tokens[first : first + BLOCK_TOKENS])
            data = {at: rows.tobytes() for at, rows in segments_of(index).items()}
            assert {len(d) for d in data.values()} == {len(inside) * 2 * 64 * 2}
            parent = (ns.digest(), tuple(tokens[:first]))
            self.blocks.setdefault(parent, []).append(FakeBlock(inside, len(inside), data))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    make_model(make_shape("qwen3-tiny"), path, seed=7)
    return path


def sources(result: Result) -> tuple[int, int, int]:
    return result.tokens_in_memory, result.tokens_restored, result.tokens_recomputed


def test_tokens_and_logprobs_are_those_of_the_stock_engine(model: Path) -> None:
    result = ReferenceEngine(model).generate(PROMPT, 16)
    assert result.text == STOCK_TEXT
    for got, want in zip(result.logprobs, STOCK_TOP, strict=False):
        for token, logprob in want:
            assert dict(got)[token] == pytest.approx(logprob, abs=0.01)


def test_restored_rows_give_the_logits_of_an_in_memory_hit_bit_for_bit(model: Path) -> None:
    store = FakeStore()
    first = ReferenceEngine(model, store)
    assert sources(first.generate(PROMPT, 8)) == (0, 0, 200)
    hit = first.generate(PROMPT, 8)
    assert sources(hit) == (199, 0, 1)
    first.forget()
    for engine in (first, ReferenceEngine(model, store)):
        restored = engine.generate(PROMPT, 8)
        assert sources(restored) == (0, 199, 1)
        assert restored.tokens == hit.tokens
        assert restored.logprobs == hit.logprobs


@pytest.mark.parametrize("differs_at", [1, 63, 64, 65, 150, 198])
def test_a_changed_prompt_resumes_at_its_first_differing_token(
    model: Path, differs_at: int
) -> None:
    changed = PROMPT[:differs_at] + "#" + PROMPT[differs_at:]
    assert PROMPT[differs_at] != "#"
    store = FakeStore()
    first = ReferenceEngine(model, store)
    first.generate(PROMPT, 2)
    before = copy.deepcopy(store)
    hit = first.generate(changed, 8)
    restored = ReferenceEngine(model, before).generate(changed, 8)
    assert sources(hit) == (differs_at, 0, 201 - differs_at)
    assert sources(restored) == (0, differs_at, 201 - differs_at)
    assert restored.logprobs == hit.logprobs


def test_memory_and_store_add_up(model: Path) -> None:
    store = FakeStore()
    ReferenceEngine(model, store).generate(PROMPT, 1)
    engine = ReferenceEngine(model, store)
    engine.generate(PROMPT[:100] + "#", 1, resume=False)
    assert sources(engine.generate(PROMPT, 1)) == (100, 99, 1)


def test_the_answer_is_stored_too(model: Path) -> None:
    store = FakeStore()
    answer = ReferenceEngine(model, store).generate(PROMPT, 40)
    next_turn = ReferenceEngine(model, store).generate(PROMPT + answer.text + "more", 1)
    # The last token of an answer is never computed, so it has no row.
    assert sources(next_turn) == (0, 239, 5)


def test_without_resume_everything_is_computed(model: Path) -> None:
    engine = ReferenceEngine(model, FakeStore())
    engine.generate(PROMPT, 1)
    assert sources(engine.generate(PROMPT, 1, resume=False)) == (0, 0, 200)


def test_a_store_that_fails_is_a_miss(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeStore):
        def match(self, ns: Namespace, tokens: Sequence[int]) -> FakeMatch:
            raise ServiceError("sidecar down")

        def put(self, *_: object) -> None:
            raise OSError("disk full")

    want = ReferenceEngine(model).generate(PROMPT, 4)
    got = ReferenceEngine(model, Broken()).generate(PROMPT, 4)
    assert sources(got) == (0, 0, 200)
    assert got.logprobs == want.logprobs
    assert "sidecar down" in caplog.text
    assert "disk full" in caplog.text


def test_blocks_evicted_since_the_match_are_computed(model: Path) -> None:
    class Evicting(FakeStore):
        def get(self, ns: Namespace, match: FakeMatch) -> list[FakeBlock]:
            return match.blocks[:2]

    store = Evicting()
    ReferenceEngine(model, store).generate(PROMPT, 1)
    assert sources(ReferenceEngine(model, store).generate(PROMPT, 1)) == (0, 128, 72)


def test_models_differ_in_their_namespace(model: Path, tmp_path: Path) -> None:
    make_model(make_shape("qwen3-tiny"), tmp_path / "other.gguf", seed=8)
    other = ReferenceEngine(tmp_path / "other.gguf")
    assert other.namespace.digest() != ReferenceEngine(model).namespace.digest()


@pytest.mark.parametrize("kind", ["k", "v"])
def test_one_flipped_bit_of_an_early_row_moves_later_logits(model: Path, kind: str) -> None:
    engine, rng, ids = ReferenceEngine(model), random.Random(1), vocab.encode(PROMPT)
    engine.generate(PROMPT, 1)
    bits = engine._cache[kind].view(np.uint16)

    def logits() -> NDArray[np.float32]:
        engine._tokens = ids[:-1]
        return engine._forward(ids[-1:])[list(vocab.PRINTABLE)]

    want, moved = logits(), []
    for _ in range(40):
        at = rng.randrange(bits.shape[0]), rng.randrange(90, 110), rng.randrange(bits.shape[2])
        bits[at] ^= 0x200
        moved.append(float(np.abs(logits() - want).max()))
        bits[at] ^= 0x200
    assert np.median(moved) > 1e-4
    assert np.array_equal(logits(), want)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_answer_is_printable_never_ends_itself_and_never_repeats_a_token(
    tmp_path: Path, seed: int
) -> None:
    make_model(make_shape("qwen3-tiny"), tmp_path / "m.gguf", seed=seed)
    result = ReferenceEngine(tmp_path / "m.gguf").generate(PROMPT, 150)
    assert set(result.tokens) <= set(vocab.PRINTABLE)
    assert all(a != b for a, b in zip(result.tokens, result.tokens[1:], strict=False))
    top = [np.exp(step[0][1]) for step in result.logprobs]
    assert 0.1 < np.mean(top) < 0.9


def test_a_prompt_that_does_not_fit_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="must fit into 210"):
        ReferenceEngine(model, ctx=210).generate(PROMPT, 11)


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    make_model(make_shape("llama-tiny", layers=1), tmp_path / "llama.gguf")
    with pytest.raises(UsageError, match="a llama model"):
        ReferenceEngine(tmp_path / "llama.gguf")
