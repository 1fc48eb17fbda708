"""Sides in turns, one at a time, with a model that answers as ours does; which one is ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from measure.peers import sides as peers
from measure.peers.__main__ import prompt_of as real_prompt_of
from measure.peers.sides import NEW_TOKENS, OURS, Best, NotMeasured, Side, SideCase, differs
from measure.peers.table import table, verdicts
from ollama_tiering.errors import ResultDiffers, ServiceError

BEST = (("a", -1.0), ("b", -1.5), ("c", -2.0), ("d", -2.5), ("e", -3.0))
OTHER = (("v", -1.0), ("w", -1.5), ("x", -2.0), ("a", -2.5), ("b", -3.0))


@dataclass
class Generated:
    prompt_tokens: int
    tokens: list[str]
    logprobs: list[Best]
    seconds_to_first_token: float
    seconds_to_last_token: float


@dataclass
class Counts:
    restored_tokens: int = 0


@dataclass
class Engine:
    machine: Machine
    name: str
    seconds: float  # to the first token, and a tenth of it for each more
    best: Best = BEST
    restored: int = 0
    new_tokens: int = NEW_TOKENS
    dies_at: int = 0  # prompt tokens
    engine: str = "program 1.0"
    built_for: str = "AVX2"

    def generate(self, prompt: str, new_tokens: int) -> Generated:
        if self.name.startswith(OURS) and (self.name, prompt) in self.machine.log:
            self.restored += len(prompt)  # ours has stored it
        self.machine.log.append((self.name, prompt))
        if self.dies_at == len(prompt):
            raise ServiceError("it died; last lines of its log:", told="  GGML_ASSERT\n  aborted")
        count = min(self.new_tokens, new_tokens)
        last = self.seconds * (1 + (count - 1) / 10)
        return Generated(len(prompt), ["a"] * count, [self.best] * count, self.seconds, last)

    def settle(self) -> Counts:
        return Counts(self.restored)


@dataclass
class Machine:
    """What its processes were asked, in order; at most one may run."""

    log: list[tuple[str, str]] = field(default_factory=list)
    running: int = 0

    def side(
        self,
        program: str,
        setting: str = "s",
        *,
        may_fail: bool = False,
        short: bool = False,
        **how: object,
    ) -> Side:
        @contextlib.contextmanager
        def start() -> Iterator[Engine]:
            self.running += 1
            assert self.running == 1, "two would share the cores"
            try:
                yield Engine(self, f"{program}, {setting}", **how)  # type: ignore[arg-type]
            finally:
                self.running -= 1

        return Side(program, setting, start, may_fail, short)


def prompt_of(tokens: int, number: int) -> str:
    return (str(number) + "x" * tokens)[:tokens]


def measured(
    sides: list[Side], repeats: dict[int, int] | None = None
) -> tuple[list[SideCase], list[NotMeasured]]:
    return peers.measure(sides, prompt_of, repeats or {100: 1}, lambda _text: None)


def test_sides_take_turns_with_one_prompt_a_round_and_the_order_turns() -> None:
    machine = Machine()
    sides = [machine.side(OURS, seconds=1.0), machine.side("x", seconds=2.0)]
    cases, failures = measured(sides, {100: 3, 200: 1})
    asked = [(name[:4], len(prompt), prompt[0]) for name, prompt in machine.log if len(prompt) > 64]
    assert asked == [
        ("ours", 100, "0"), ("ours", 200, "0"), ("x, s", 100, "0"), ("x, s", 200, "0"),
        ("x, s", 100, "1"), ("ours", 100, "1"),
        ("ours", 100, "2"), ("x, s", 100, "2"),
    ]  # fmt: skip
    warm = [name for name, prompt in machine.log if len(prompt) == 64]
    assert warm == [name for name, prompt in machine.log if len(prompt) == 100], "weights are read"
    assert [(c.program, c.prompt_tokens, len(c.first_seconds)) for c in cases] == [
        (OURS, 100, 3), ("x", 100, 3), (OURS, 200, 1), ("x", 200, 1),
    ]  # fmt: skip
    assert not failures


def test_a_peer_that_dies_is_noted_once_and_the_rest_goes_on() -> None:
    machine = Machine()
    dies = machine.side("x", "on", seconds=2.0, dies_at=200, may_fail=True)
    lives = machine.side("x", "off", seconds=3.0, may_fail=True)
    ours = machine.side(OURS, seconds=1.0)
    cases, failures = measured([ours, dies, lives], {100: 2, 200: 2})
    assert failures == [NotMeasured("x, on", "it died; last lines of its log: aborted")]
    found = {(c.program, c.setting, c.prompt_tokens): len(c.first_seconds) for c in cases}
    assert found["x", "on", 100] == 1, "what it did before stays, and it is not started again"
    assert ("x", "on", 200) not in found
    assert found["x", "off", 200] == found[OURS, "s", 200] == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"best": OTHER}, "same model"),
        ({"new_tokens": NEW_TOKENS - 1}, "generated"),
        ({"restored": 7}, "restored"),
    ],
)
def test_another_model_or_less_work_is_no_measurement(wrong: dict[str, object], why: str) -> None:
    machine = Machine()
    ours = machine.side(OURS, seconds=1.0)
    sides = [ours, machine.side("x", seconds=1.0, may_fail=True, **wrong)]
    with pytest.raises(ResultDiffers, match=why):
        measured(sides)


def test_rounding_is_no_difference_and_another_model_is() -> None:
    near = tuple((token, logprob + 0.2) for token, logprob in reversed(BEST))
    assert differs(BEST, near) == ""
    assert differs(BEST, (*BEST[:3], ("y", -2.4), ("z", -2.6))) == ""
    assert "2 of ours" in differs(BEST, OTHER)
    assert "0.60" in differs(BEST, tuple((token, logprob - 0.6) for token, logprob in BEST))


def test_one_run_has_its_value_for_quartiles() -> None:
    assert peers.quartiles([3.0]) == [3.0, 3.0]
    assert peers.quartiles([1.0, 2.0, 4.0]) == [1.5, 3.0]


CASES = [
    SideCase(OURS, "exact", 100, "Ollama", "this machine", [1.0, 1.2, 0.8], [20.0, 20.0, 20.0]),
    SideCase("x", "on", 100, "x 2", "AVX2", [1.5, 1.5, 1.5], [8.0, 8.0, 8.0]),
    SideCase("x", "off", 100, "x 2", "AVX2", [2.0, 2.0, 2.0], [25.0, 25.0, 25.0]),
]


def made(failures: list[NotMeasured]) -> tuple[dict[str, list[str]], str]:
    found = table("shape", CASES, failures, threads=2, batch_tokens=512, stock="stock Ollama")
    assert all(len(row) == len(found.headings) for row in found.rows)
    return {row[2]: list(row) for row in found.rows}, "\n".join(found.notes)


def test_the_better_setting_of_each_figure_is_bold_and_compared() -> None:
    rows, notes = made([])
    assert rows["exact"][4:6] == ["**1.000 s (0.900 s to 1.100 s)**", ""]
    assert rows["on"][3:6] == ["AVX2", "**1.500 s**", "1.50x"]
    assert rows["off"][4:8] == ["2.000 s", "2.00x", "**25.0 tokens/s**", "0.80x"]
    assert rows["on"][6] == "8.0 tokens/s"
    assert verdicts(CASES) == [
        "100 tokens, x: first token 1.50x, ours is ahead (on), "
        "decode 0.80x, ours is NOT ahead (off)."
    ]
    assert "threads 2, batches of 512, an f16 cache" in notes
    assert "no upper bound" in notes


def test_no_two_prompts_share_a_beginning() -> None:
    cases = [(tokens, number) for tokens in (64, 1064, 2064, 8192) for number in range(-1, 4)]
    assert len({real_prompt_of(*case)[:16] for case in cases}) == len(cases)
