"""What counts as a restore, and what the numbers are ratios of."""

from dataclasses import dataclass, field, replace

import pytest

from ollama_tiering.bench import restore
from ollama_tiering.bench.machine import Machine
from ollama_tiering.errors import ResultDiffers


@dataclass(frozen=True)
class Answer:
    tokens: tuple[str, ...] = ("a",)
    logprobs: tuple[tuple[tuple[str, float], ...], ...] = ((("a", -0.5),),)
    seconds_to_first_token: float = 8.0
    prompt_tokens: int = 100
    restored_tokens: int = 0


@dataclass
class Report:
    bytes: int = 4_000_000_000
    lookup_seconds: float = 0.5
    fetch_seconds: float = 0.5
    copy_seconds: float = 1.0
    memcpy_seconds: float = 0.5
    memcpy_all_seconds: float = 0.25


RESTORED = Answer(restored_tokens=99, seconds_to_first_token=2.0)


@dataclass
class Engine:
    answers: list[Answer]
    restarts: list[tuple[bool, bool]] = field(default_factory=list)

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        return self.answers.pop(0)

    def again(self, *, reboot: bool, measure: bool) -> None:
        self.restarts.append((reboot, measure))

    def last_restore(self) -> Report:
        return Report()


def run(engine: Engine, **more: object) -> restore.Case:
    options = {"flash": True, "tier": "ram", "repeat": 2} | more
    return restore.measure(engine, "prompt", lambda _line: None, **options)


def test_the_gain_is_cold_over_the_median_of_the_restored() -> None:
    seconds = (1.0, 4.0, 2.0, 100.0, 100.0, 100.0)
    restored = [replace(RESTORED, seconds_to_first_token=s) for s in seconds]
    case = run(Engine([Answer(), Answer(), *restored]), repeat=3)
    assert case.restored_seconds == (1.0, 4.0, 2.0)  # those with a memcpy beside are not
    assert case.gain == 8.0 / 2.0


def test_as_many_restarts_have_a_memcpy_beside_them() -> None:
    engine = Engine([Answer(), Answer(), *[RESTORED] * 4])
    run(engine, tier="local")
    assert engine.restarts == [(True, False), (True, False), (True, True), (True, True)]


def test_shares_are_of_medians() -> None:
    engine = Engine([Answer(), Answer(), *[RESTORED] * 6])
    spent = iter((1.0, 9.0, 2.0))
    engine.last_restore = lambda: Report(copy_seconds=next(spent))  # type: ignore[method-assign]
    case = run(engine, repeat=3)
    assert case.copy_seconds == 2.0
    assert case.whole_seconds == 3.0


def test_a_known_cold_time_is_not_measured_again() -> None:
    case = run(Engine([Answer(), *[RESTORED] * 4]), cold=6.0)
    assert case.cold_seconds == 6.0


def test_a_cold_run_that_restored_something_is_none() -> None:
    with pytest.raises(ResultDiffers, match="cold"):
        run(Engine([RESTORED]))


def test_a_restart_that_restores_nothing_is_an_error() -> None:
    with pytest.raises(ResultDiffers, match="nothing was restored"):
        run(Engine([Answer(), Answer(), Answer()]))


def test_one_bit_of_a_restored_answer_is_an_error() -> None:
    wrong = replace(RESTORED, logprobs=((("a", -0.5000001),),))
    with pytest.raises(ResultDiffers, match="differs"):
        run(Engine([Answer(), Answer(), wrong]))


def test_throughput_stands_beside_that_of_memcpy() -> None:
    case = run(Engine([Answer(), Answer(), *[RESTORED] * 4]))
    machine = Machine("cpu", 2, "8 GiB", "Linux", "2026-01-01", "abc")
    text = restore.table("tiny", [case]).markdown(machine, "Ollama 0.16.3", "tiering bench")
    assert "| 500 + 500 + 1000 ms | 4.00 GB/s, 50 % / 25 % | 2.00 GB/s, 25 % / 12 % |" in text
    assert "| 4.00x |" in text
    assert "commit abc" in text


def test_what_was_not_measured_is_said_to_be_so() -> None:
    case = replace(run(Engine([Answer(), Answer(), *[RESTORED] * 4])), memcpy_seconds=0.0)
    assert "not measured" in restore.table("tiny", [case]).rows[0]
