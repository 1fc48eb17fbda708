"""Steps of a day with a GPU that ask the patched Ollama: the same prompt in every way of paging,
compared with stock's answer to the bit, and timed.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering.bench.table import Table
from ollama_tiering.config import GIB, MIB, format_size
from ollama_tiering.engines import demo
from ollama_tiering.engines.context_demo import MINIMUM_BYTES, PAGED, STOCK, ContextRun
from ollama_tiering.engines.context_driver import ContextDriver
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.errors import TieringError
from ollama_tiering.launch.block_service import BlockService
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import ModelShape, make_shape
from scripts.gpuday import kernels
from scripts.gpuday.steps import DONE, FAILED, Day, Outcome

MODEL = "model.gguf"
HOT = "OLLAMA_PAGED_HOT_LAYERS"
IN_TURN = {"OLLAMA_PAGED_PREFETCH": "0"}
NO_MIRRORS = {"OLLAMA_PAGED_MIRROR": "0"}  # all K/V that are paged cross the bus
NO_GRAPHS = {"GGML_CUDA_DISABLE_GRAPHS": "1"}
HEADINGS = (
    *("run", "num_ctx", "layers on GPU", "VRAM", "of it K/V", "K/V pinned", "s to first token"),
    *("tokens/s", "digest", "as stock"),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is asked. `room_bytes`: of the GPU beside what Ollama leaves alone, when the planner has
    to choose.
    """

    shape: ModelShape
    prompt_tokens: int
    new_tokens: int
    num_ctx: int
    long_ctx: int
    room_bytes: int
    race: int  # requests


def sizes_of(day: Day) -> Sizes:
    """Qwen3-8B's geometry in Q4_K_M: 144 KiB of K/V a token, 18 GiB at 128K. Small ones for a
    stand-in.
    """
    if day.stand_in:
        shape = make_shape("qwen3-tiny", layers=8, heads=8, kv_heads=8, ctx=1 << 16)
        return Sizes(shape, 700, 16, 4096, 32768, 480 * MIB, 6)
    shape = make_shape(
        "qwen3-0.6b-q4km", layers=36, embd=4096, heads=32, kv_heads=8, ffn=12288, ctx=1 << 17
    )
    return Sizes(shape, 8192, 64, 16384, 1 << 17, 12 * GIB, 20)


class DayScratch(Scratch):
    """Its model and Ollama's directory of models stay for the next step; its logs are the step's
    own.
    """

    def __init__(self, day: Day) -> None:
        super().__init__("gpuday")
        self.day = day

    @property
    def model_file(self) -> Path:
        return self.day.work / MODEL

    @property
    def models(self) -> Path:
        return self.day.work / "models"

    def sidecar(self, *, ram_gb: float = 24, local_gb: float = 32) -> BlockService:
        """With room for the longest prompt."""
        return super().sidecar(ram_gb=ram_gb, local_gb=local_gb)

    def __exit__(self, *_: object) -> None:
        for log in self.root.glob("*.log"):
            print(f"== {log.name}\n{log.read_text(errors='replace')}", flush=True)
        for directory in (self.ram, self.root):
            shutil.rmtree(directory, ignore_errors=True)


class Asker:
    """Starts a server for every environment, and asks it the day's prompt."""

    def __init__(self, day: Day) -> None:
        self.day, self.sizes = day, sizes_of(day)
        self.prompt = demo.make_prompt(self.sizes.prompt_tokens)

    @contextlib.contextmanager
    def server(self, env: Mapping[str, str]) -> Iterator[ContextDriver]:
        with DayScratch(self.day) as scratch:
            driver = ContextDriver(self.day.program, scratch, env)
            with contextlib.closing(driver):
                driver.start()
                if not (scratch.models / "manifests").is_dir():  # hashing gigabytes takes seconds
                    driver.make()
                yield driver

    def ask(self, label: str, env: Mapping[str, str], num_ctx: int = 0) -> ContextRun:
        num_ctx = num_ctx or self.sizes.num_ctx
        with self.server(env) as server:
            answer = server.run(num_ctx, self.prompt, self.sizes.new_tokens)
        return ContextRun(label, num_ctx, *answer)

    def hot(self, what: str, env: Mapping[str, str]) -> dict[int, ContextRun]:
        """With K/V of all layers hot, of none, and of half of them."""
        layers = self.sizes.shape.layers
        return {
            hot: self.ask(
                f"{what}, {hot} of {layers} hot", PAGED | NO_MIRRORS | {**env, HOT: str(hot)}
            )
            for hot in (layers, 0, layers // 2)
        }

    def free_bytes(self) -> int:
        """Of the first GPU, as Ollama sees it. TieringError if it sees none."""
        with self.server(STOCK) as server:
            found = server.gpus()
        if not found:
            raise TieringError("Ollama finds no GPU", hint="read the step's log")
        return found[0].free_bytes


def digest(run: ContextRun) -> str:
    """Of the tokens and of every bit of their log probabilities."""
    said = repr((run.answer.tokens, run.answer.logprobs)).encode()
    return hashlib.sha256(said).hexdigest()[:16] if run.answer.tokens else "no answer"


def rate(run: ContextRun) -> float:
    return run.answer.decode_tokens_per_second


def judged(
    day: Day, runs: Sequence[ContextRun], *notes: str, free: Sequence[ContextRun] = ()
) -> Outcome:
    """A table; failed unless every answer is stock's, but those of `free`, whose last bits may
    differ.
    """
    reference, rows = day.figures("stock").get("digest", digest(runs[0])), []
    for run in (*free, *runs):
        plan, same = run.plan, "yes" if digest(run) == reference else "**no**"
        sizes = map(format_size, (plan.vram_bytes, plan.kv_vram_bytes, plan.pinned_bytes))
        first, layers = run.answer.seconds_to_first_token, f"{plan.layers_on_gpu}/{plan.layers}"
        cells = (run.label, str(run.num_ctx), layers, *sizes, f"{first:.3f}", f"{rate(run):.2f}")
        rows.append((*cells, digest(run), same))
    wrong = [run.label for run in runs if digest(run) != reference or not run.answer.tokens]
    why = f"another answer than stock's: {', '.join(wrong)}" if wrong else ""
    return Outcome(FAILED if wrong else DONE, Table("", HEADINGS, rows, notes).lines(), why=why)


def model(day: Day) -> Outcome:
    shape = sizes_of(day).shape
    shutil.rmtree(day.work / "models", ignore_errors=True)  # of another one
    stored = make_model(shape, day.work / MODEL, seed=1)
    return Outcome(DONE, [f"{shape.words}; {stored / MIB:,.0f} MiB"])


def stock(day: Day) -> Outcome:
    """All layers on the GPU, by stock's library: the answer that all others are compared with."""
    run = Asker(day).ask("stock", STOCK)
    outcome = judged(day, [run])
    outcome.figures = {"digest": digest(run), "tokens_per_second": rate(run)}
    if not run.plan.all_on_gpu or not run.answer.tokens:
        outcome.status, outcome.why = FAILED, "not all layers are on the GPU, or no answer came"
    return outcome


def sequential(day: Day) -> Outcome:
    runs = Asker(day).hot("in turn", IN_TURN)
    outcome = judged(day, list(runs.values()))
    outcome.figures = {str(hot): rate(run) for hot, run in runs.items()}
    return outcome


def prefetch(day: Day) -> Outcome:
    asker = Asker(day)
    runs = asker.hot("copied ahead", {})
    mirrored = asker.ask(f"mirrors, 0 of {asker.sizes.shape.layers} hot", PAGED | {HOT: "0"})
    rates = {str(hot): rate(run) for hot, run in runs.items()}
    in_turn: dict[str, float] = day.figures("sequential")  # by layers that are hot
    notes = [
        f"Copied ahead ÷ in turn, tokens/s, {hot} hot: {value / in_turn[hot]:.3f}."
        for hot, value in rates.items()
        if in_turn.get(hot)
    ]
    if rates["0"]:
        notes.append(f"Mirrors ÷ copied ahead, tokens/s, 0 hot: {rate(mirrored) / rates['0']:.3f}.")
    outcome = judged(day, [*runs.values(), mirrored], *notes)
    outcome.figures = rates
    pinned = day.figures("rates").get(kernels.PINNED)
    hot = rates[str(asker.sizes.shape.layers)]
    outcome.bounds = copy_bounds(asker.sizes, rates["0"], in_turn.get("0"), hot, pinned)
    return outcome


def copy_bounds(
    sizes: Sizes, ahead: float, in_turn: float | None, hot: float, pinned: float | None
) -> dict[str, float | None]:
    """Of decode with all K/V in pinned memory, by tokens/s in both ways and with all K/V hot, and
    measured bytes/s. Open where a part of them was not measured. Copies and computing that go on
    at the same time save the shorter of both.
    """
    if not pinned or not ahead:
        return {}
    # what a token in the middle of the answer reads; a little more is staged, in steps of cells
    used = (sizes.prompt_tokens + sizes.new_tokens / 2) * sizes.shape.kv_bytes_per_token
    saved = None
    if in_turn and hot:
        saved = (1 / in_turn - 1 / ahead) / min(used / pinned, 1 / hot)
    return {"staging": used * ahead / pinned, "ahead": saved}


def planner(day: Day) -> Outcome:
    """A GPU with little room and a long context: all layers stay, where stock gives layers up."""
    asker = Asker(day)
    sizes = asker.sizes
    overhead = max(0, asker.free_bytes() - MINIMUM_BYTES - sizes.room_bytes)
    room = {"OLLAMA_GPU_OVERHEAD": str(overhead)}
    divided = asker.ask("stock's plan", STOCK | room, sizes.long_ctx)
    ours = asker.ask("paged", PAGED | room, sizes.long_ctx)
    notes = [
        f"{format_size(sizes.room_bytes)} of the GPU may be used. In stock's plan the CPU computes "
        "some layers, so its last bits may be others."
    ]
    ratio = rate(ours) / rate(divided) if rate(divided) else None
    notes += [f"Paged ÷ stock's plan, tokens/s: {ratio:.2f}."] if ratio else []
    outcome = judged(day, [ours], *notes, free=[divided])
    outcome.figures = {"paged_to_divided": ratio}
    if not ours.plan.all_on_gpu or divided.plan.all_on_gpu:
        outcome.status = FAILED
        outcome.why = (
            f"layers on the GPU: stock {divided.plan.layers_on_gpu}, paged "
            f"{ours.plan.layers_on_gpu}, of {ours.plan.layers}"
        )
    return outcome


def graphs(day: Day) -> Outcome:
    """CUDA graphs, which the shim must not cost where nothing is paged."""
    asker = Asker(day)
    hot = PAGED | {HOT: str(asker.sizes.shape.layers)}
    ways = {
        "stock": STOCK,
        "all hot": hot,
        "stock, no graphs": STOCK | NO_GRAPHS,
        "all hot, no graphs": hot | NO_GRAPHS,
    }
    runs = [asker.ask(label, env) for _ in range(2) for label, env in ways.items()]
    best = {label: max(rate(run) for run in runs if run.label == label) for label in ways}
    outcome = judged(day, runs, "The best of two runs counts.")
    outcome.figures = best
    if best["stock"]:
        outcome.bounds = {"all hot": best["all hot"] / best["stock"]}
    return outcome
