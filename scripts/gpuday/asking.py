"""Steps of a day with a GPU that ask the patched Ollama: the same prompt in every way of paging,
compared with stock's answer to the bit, and timed.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ollama_tiering.config import GIB, MIB, format_size
from ollama_tiering.engines import demo
from ollama_tiering.engines.context_demo import MINIMUM_BYTES, PAGED, STOCK
from ollama_tiering.engines.context_driver import ContextDriver
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.engines.ollama_driver import OllamaDriver
from ollama_tiering.errors import TieringError
from ollama_tiering.launch.ollama import Generated
from ollama_tiering.launch.server_log import LoadPlan
from ollama_tiering.models.shapes import ModelShape, make_shape
from scripts.gpuday import bounds
from scripts.gpuday.steps import DONE, FAILED, Bound, Outcome

HOT = "OLLAMA_PAGED_HOT_LAYERS"
IN_TURN = {"OLLAMA_PAGED_PREFETCH": "0"}
NO_MIRRORS = {"OLLAMA_PAGED_MIRROR": "0"}  # all K/V that are paged cross the bus


@dataclass(frozen=True)
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

    @property
    def layers(self) -> int:
        return self.shape.layers


def real() -> Sizes:
    """Qwen3-8B's geometry: 144 KiB of K/V a token, 18 GiB at 128K."""
    shape = make_shape(
        "qwen3-0.6b", layers=36, embd=4096, heads=32, kv_heads=8, ffn=12288, ctx=1 << 17
    )
    return Sizes(shape, 8192, 64, 16384, 1 << 17, 12 * GIB, 20)


def small() -> Sizes:
    """To try the steps where there is no GPU."""
    shape = make_shape("qwen3-tiny", layers=8, heads=8, kv_heads=8, ctx=1 << 16)
    return Sizes(shape, 700, 16, 4096, 32768, 480 * MIB, 6)


class DayScratch(Scratch):
    """Its model and Ollama's directory of models stay for the next step."""

    def __init__(self, work: Path) -> None:
        super().__init__("gpuday")
        self.work = work

    @property
    def model_file(self) -> Path:
        return self.work / "model.gguf"

    @property
    def models(self) -> Path:
        return self.work / "models"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for log in self.root.glob("*.log"):
            print(f"== {log.name}\n{log.read_text(errors='replace')}", flush=True)
        for directory in (self.ram, self.root):
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class Asked:
    """An answer, by how it was asked."""

    label: str
    num_ctx: int
    plan: LoadPlan
    answer: Generated

    @property
    def digest(self) -> str:
        """Of the tokens and of every bit of their log probabilities."""
        said = repr((self.answer.tokens, self.answer.logprobs)) if self.answer.tokens else ""
        return hashlib.sha256(said.encode()).hexdigest()[:16] if said else "no answer"

    @property
    def rate(self) -> float:
        return self.answer.decode_tokens_per_second

    def row(self, reference: str) -> str:
        plan = self.plan
        cells = (
            self.label,
            f"{self.num_ctx}",
            f"{plan.layers_on_gpu}/{plan.layers}",
            *map(format_size, (plan.vram_bytes, plan.kv_vram_bytes, plan.pinned_bytes)),
            f"{self.answer.seconds_to_first_token:.3f}",
            f"{self.rate:.2f}",
            self.digest,
            "yes" if self.digest == reference else "**no**",
        )
        return f"| {' | '.join(cells)} |"


HEAD = [
    "| run | num_ctx | layers on GPU | VRAM | of it K/V | K/V pinned | s to first token | "
    "tokens/s | digest | as stock |",
    "|---|---|---|---|---|---|---|---|---|---|",
]


class Asker:
    """Starts a server of the program for every environment, and asks it the day's prompt."""

    def __init__(self, program: Path, work: Path, sizes: Sizes) -> None:
        self.program, self.work, self.sizes = program, work, sizes
        self.prompt = demo.make_prompt(sizes.prompt_tokens)

    @contextlib.contextmanager
    def server(self, env: Mapping[str, str]) -> Iterator[ContextDriver]:
        with DayScratch(self.work) as scratch:
            driver = ContextDriver(self.program, scratch, env)
            with contextlib.closing(driver):
                driver.start()
                if not (scratch.models / "manifests").is_dir():  # hashing gigabytes takes seconds
                    driver.make()
                yield driver

    def ask(self, label: str, env: Mapping[str, str], num_ctx: int | None = None) -> Asked:
        num_ctx = num_ctx or self.sizes.num_ctx
        with self.server(env) as server:
            return Asked(label, num_ctx, *server.run(num_ctx, self.prompt, self.sizes.new_tokens))

    def free_bytes(self) -> int:
        """Of the first GPU, as Ollama sees it. TieringError if it sees none."""
        with self.server(STOCK) as server:
            found = server.gpus()
        if not found:
            raise TieringError("Ollama finds no GPU", hint="read the step's log")
        return found[0].free_bytes


def judged(runs: list[Asked], reference: str, lines: list[str], **figures: Any) -> Outcome:
    """A table of runs; failed unless every answer is the reference's."""
    wrong = [run.label for run in runs if run.digest != reference or not run.answer.tokens]
    why = f"another answer than stock's: {', '.join(wrong)}" if wrong else ""
    table = [*HEAD, *(run.row(reference) for run in runs)]
    status = FAILED if wrong else DONE
    return Outcome(status, [*table, *([""] if lines else []), *lines], figures, why=why)


def stock(asker: Asker) -> Outcome:
    """All layers on the GPU, by stock's library: the answer that all others are compared with."""
    run = asker.ask("stock", STOCK)
    outcome = judged([run], run.digest, [], digest=run.digest, tokens_per_second=run.rate)
    if not run.plan.all_on_gpu or not run.answer.tokens:
        outcome.status, outcome.why = FAILED, "not all layers are on the GPU, or no answer came"
    return outcome


def _hot(asker: Asker, what: str, env: Mapping[str, str]) -> dict[int, Asked]:
    """With K/V of all layers hot, of none, and of half of them."""
    layers, paged = asker.sizes.layers, PAGED | NO_MIRRORS | dict(env)
    return {
        hot: asker.ask(f"{what}, {hot} of {layers} hot", paged | {HOT: str(hot)})
        for hot in (layers, 0, layers // 2)
    }


def sequential(asker: Asker, reference: str) -> Outcome:
    runs = _hot(asker, "in turn", IN_TURN)
    rates = {str(hot): run.rate for hot, run in runs.items()}
    return judged(list(runs.values()), reference, [], tokens_per_second=rates)


def prefetch(
    asker: Asker, reference: str, in_turn: Mapping[str, float], pinned_rate: float | None
) -> Outcome:
    """`in_turn` are the rates of `sequential`; `pinned_rate` is measured bytes per second."""
    runs = _hot(asker, "copied ahead", {})
    mirrored = asker.ask(f"mirrors, 0 of {asker.sizes.layers} hot", PAGED | {HOT: "0"})
    rates = {str(hot): run.rate for hot, run in runs.items()}
    lines = [
        f"Copied ahead ÷ in turn, tokens/s, {hot} hot: {rate / in_turn[hot]:.3f}."
        for hot, rate in rates.items()
        if in_turn.get(hot)
    ]
    if rates["0"]:
        lines.append(f"Mirrors ÷ copied ahead, tokens/s, 0 hot: {mirrored.rate / rates['0']:.3f}.")
    outcome = judged([*runs.values(), mirrored], reference, lines, tokens_per_second=rates)
    outcome.bounds = copy_bounds(asker.sizes, rates["0"], in_turn.get("0"), pinned_rate)
    return outcome


def copy_bounds(
    sizes: Sizes, ahead: float, in_turn: float | None, pinned_rate: float | None
) -> list[Bound]:
    """Of decode with all K/V in pinned memory. Open where a part of them was not measured."""
    # what a token in the middle of the answer reads; a little more is staged, in steps of cells
    used = (sizes.prompt_tokens + sizes.new_tokens / 2) * sizes.shape.kv_bytes_per_token
    staging = overlap = None
    if pinned_rate and ahead:
        staging = used * ahead / pinned_rate
        if in_turn:
            overlap = (1 / in_turn - 1 / ahead) / (used / pinned_rate)
    return [bounds.STAGING.of(staging), bounds.AHEAD.of(overlap)]


def planner(asker: Asker, reference: str) -> Outcome:
    """A GPU with little room and a long context: all layers stay, where stock gives layers up."""
    sizes = asker.sizes
    overhead = max(0, asker.free_bytes() - MINIMUM_BYTES - sizes.room_bytes)
    room = {"OLLAMA_GPU_OVERHEAD": str(overhead)}
    divided = asker.ask("stock's plan", STOCK | room, sizes.long_ctx)
    ours = asker.ask("paged", PAGED | room, sizes.long_ctx)
    outcome = judged([ours], reference, [])
    outcome.lines.insert(2, divided.row(reference))
    outcome.lines += [
        "",
        f"{format_size(sizes.room_bytes)} of the GPU may be used. In stock's plan the CPU computes "
        "some layers, so its last bits may be others.",
    ]
    if not ours.plan.all_on_gpu or divided.plan.all_on_gpu:
        outcome.status = FAILED
        outcome.why = (
            f"layers on the GPU: stock {divided.plan.layers_on_gpu}, paged "
            f"{ours.plan.layers_on_gpu}, of {ours.plan.layers}"
        )
    if divided.rate:
        outcome.figures["paged_to_divided"] = ours.rate / divided.rate
        outcome.lines.append(f"Paged ÷ stock's plan, tokens/s: {ours.rate / divided.rate:.2f}.")
    return outcome


def tiering(asker: Asker) -> Outcome:
    """Half of the layers hot, the others pinned: stored, restored after a restart, and requests of
    two conversations in a race.
    """
    sizes = asker.sizes
    env: dict[str, str | None] = {"OLLAMA_KV_TIER_GATE": "restore", HOT: str(sizes.layers // 2)}
    with DayScratch(asker.work) as scratch:
        driver = OllamaDriver(asker.program, scratch, ctx=sizes.num_ctx, env=env | PAGED)
        with contextlib.closing(driver):
            shown = demo.show(driver, asker.prompt, lambda text: print("*", text, flush=True))
            differ = _race(driver, asker)
    rows = [
        f"| {row.label} | {row.answer.seconds_to_first_token:.3f} | {row.answer.restored_tokens} | "
        f"{row.verdict} |"
        for row in shown.rows
    ]
    lines = ["| request | s to first token | tokens restored | as in memory |", "|---|---|---|---|"]
    lines += [*rows, "", f"Race: {differ} of {sizes.race} answers differ."]
    why = "; ".join([*shown.failures, *([f"{differ} answers differ in a race"] if differ else [])])
    return Outcome(FAILED if why else DONE, lines, {"race_differ": differ}, why=why)


def _race(driver: OllamaDriver, asker: Asker) -> int:
    """How many of the requests, of two conversations in turn and without a pause, are not answered
    as their conversation was before.
    """
    sizes = asker.sizes
    prompts = [demo.make_prompt(sizes.prompt_tokens // 2, seed) for seed in (2, 3)]
    first: dict[str, Generated] = {}
    differ = 0
    for number in range(sizes.race + 6):
        prompt = prompts[number % 2]
        answer = driver.generate(prompt, 8)
        if number in (4, 5):  # stored and restored by now, as all that follow
            first[prompt] = answer
        elif number > 5:
            expected = first[prompt]
            same = (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
            differ += not same
    return differ


def graphs(asker: Asker, reference: str) -> Outcome:
    """CUDA graphs, which the shim must not cost where nothing is paged."""
    off = {"GGML_CUDA_DISABLE_GRAPHS": "1"}
    hot = PAGED | {HOT: str(asker.sizes.layers)}
    ways = {
        "stock": STOCK,
        "all hot": hot,
        "stock, no graphs": STOCK | off,
        "all hot, no graphs": hot | off,
    }
    runs = [asker.ask(label, env) for _ in range(2) for label, env in ways.items()]
    best = {label: max(run.rate for run in runs if run.label == label) for label in ways}
    outcome = judged(runs, reference, ["The best of two runs counts."], tokens_per_second=best)
    ratio = best["all hot"] / best["stock"] if best["stock"] else None
    outcome.bounds = [bounds.ALL_HOT.of(ratio)]
    return outcome
