"""Steps of a day with a GPU that store and restore: what comes back is what memory has, and how
fast it comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ollama_tiering.bench.table import Table
from ollama_tiering.config import MIB
from ollama_tiering.engines import demo
from ollama_tiering.engines.context_demo import PAGED, STOCK
from ollama_tiering.engines.drivers import Answer
from ollama_tiering.engines.ollama_driver import OllamaDriver
from ollama_tiering.store import block_store_pb2 as pb
from scripts.gpuday import kernels
from scripts.gpuday.asking import HOT, DayScratch, Sizes, sizes_of
from scripts.gpuday.steps import DONE, FAILED, Day, Outcome

ALWAYS = {"OLLAMA_KV_TIER_GATE": "restore"}
HEADINGS = (
    *("prompt", "request", "s to first token", "computed", "restored", "as in memory", "MiB"),
    *("look-up, ms", "fetch, ms", "copy, ms", "copy, GB/s", "÷ pinned copy", "all of it, GB/s"),
)


class Recorder(OllamaDriver):
    """Keeps what each restore cost."""

    restores: list[pb.RestoreReport]

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        answer = super().ask(prompt, new_tokens)
        last = self.last_report.last_restore if self.last_report else pb.RestoreReport()
        self.restores.append(last if answer.restored_tokens else pb.RestoreReport())
        return answer


@dataclass(frozen=True, slots=True)
class Run:
    """A demonstration with a prompt of so many tokens, and what its restores cost."""

    tokens: int
    shown: demo.DemoOutcome
    restores: Sequence[pb.RestoreReport]

    def rows(self, pinned: float | None) -> Iterator[tuple[str, ...]]:
        for row, cost in zip(self.shown.rows, self.restores, strict=True):
            answer = row.answer
            counts = str(answer.recomputed_tokens), str(answer.restored_tokens)
            first = f"{answer.seconds_to_first_token:.3f}"
            yield (str(self.tokens), row.label, first, *counts, row.verdict, *_cost(cost, pinned))

    def best_copy(self) -> float:
        """Bytes/s, of the restores."""
        rates = [one.bytes / one.copy_seconds for one in self.restores if one.copy_seconds]
        return max(rates, default=0.0)


def _cost(cost: pb.RestoreReport, pinned: float | None) -> tuple[str, ...]:
    if not cost.bytes or not cost.copy_seconds:
        return ("",) * 7
    parts = cost.lookup_seconds, cost.fetch_seconds, cost.copy_seconds
    copy = cost.bytes / cost.copy_seconds
    return (
        f"{cost.bytes / MIB:,.0f}",
        *(f"{1e3 * seconds:.1f}" for seconds in parts),
        f"{copy / 1e9:.2f}",
        f"{copy / pinned:.2f}" if pinned else "-",
        f"{cost.bytes / sum(parts) / 1e9:.2f}",
    )


def run(day: Day, env: Mapping[str, str], tokens: int, num_ctx: int, races: int) -> tuple[Run, int]:
    """And how many answers of a race differ."""
    sizes, differ = sizes_of(day), 0
    with DayScratch(day) as scratch:
        driver = Recorder(day.program, scratch, ctx=num_ctx, env=env)
        driver.restores = []
        with contextlib.closing(driver):
            prompt = demo.make_prompt(tokens)
            shown = demo.show(driver, prompt, lambda text: print("*", text, flush=True))
            restores = list(driver.restores)
            if races:
                differ = race(driver, sizes)
    return Run(tokens, shown, restores), differ


def restore(day: Day) -> Outcome:
    """All layers in VRAM, as stock has them: stored, restored after an unload and a restart."""
    sizes = sizes_of(day)
    lengths = [(sizes.prompt_tokens, sizes.num_ctx)]
    if not day.stand_in:
        lengths.append((4 * sizes.prompt_tokens, 5 * sizes.prompt_tokens))
    found = [run(day, STOCK | ALWAYS, *length, 0)[0] for length in lengths]
    outcome = told(day, found)
    pinned = day.figures("rates").get(kernels.PINNED)
    if pinned and (best := max(one.best_copy() for one in found)):
        outcome.bounds = {"restore": best / pinned}
    return outcome


def tiering(day: Day) -> Outcome:
    """Half of the layers hot, the others pinned: stored, restored after a restart, and requests of
    two conversations in a race.
    """
    sizes = sizes_of(day)
    env = PAGED | ALWAYS | {HOT: str(sizes.shape.layers // 2)}
    found, differ = run(day, env, sizes.prompt_tokens, sizes.num_ctx, sizes.race)
    outcome = told(day, [found], f"Race: {differ} of {sizes.race} answers differ.")
    outcome.figures = {"race_differ": differ}
    if differ:
        outcome.status = FAILED
        outcome.why = "; ".join(filter(None, [outcome.why, f"{differ} answers differ in a race"]))
    return outcome


def gate(day: Day) -> Outcome:
    """The default: it restores what is quicker to restore, and says what it leaves."""
    sizes = sizes_of(day)
    found, _ = run(day, STOCK, sizes.prompt_tokens, sizes.num_ctx, 0)
    outcome = told(day, [found])
    left = [line for line in found.shown.failures if line.endswith("nothing was restored")]
    wrong = [line for line in found.shown.failures if line not in left]
    outcome.status, outcome.why = (FAILED, "; ".join(wrong)) if wrong else (DONE, "")
    return outcome


def told(day: Day, found: Sequence[Run], *notes: str) -> Outcome:
    pinned = day.figures("rates").get(kernels.PINNED)
    rows = [row for one in found for row in one.rows(pinned)]
    why = "; ".join(f"{one.tokens}: {line}" for one in found for line in one.shown.failures)
    lines = Table("", HEADINGS, rows, list(notes)).lines()
    return Outcome(FAILED if why else DONE, lines, why=why)


def race(driver: OllamaDriver, sizes: Sizes) -> int:
    """How many of the requests, of two conversations in turn and without a pause, are not answered
    as their conversation was before.
    """
    prompts = [demo.make_prompt(sizes.prompt_tokens // 2, seed) for seed in (2, 3)]
    given = [driver.generate(prompts[number % 2], 8) for number in range(sizes.race + 6)]
    answers = [(one.tokens, one.logprobs) for one in given]
    # from 4 on all are stored and restored
    return sum(answer != answers[4 + number % 2] for number, answer in enumerate(answers[6:]))
