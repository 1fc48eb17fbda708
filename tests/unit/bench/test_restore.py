"""What counts as a restore, and what the numbers are ratios of."""

from dataclasses import dataclass, field, replace

import pytest

from ollama_tiering.bench import restore
from ollama_tiering.bench.baselines import Baselines, Cold
from ollama_tiering.bench.machine import Machine
from ollama_tiering.bench.restore_table import table
from ollama_tiering.errors import ResultDiffers


@dataclass(frozen=True)
class Answer:
    tokens: tuple[str, ...] = ("a",)
    logprobs: tuple[tuple[tuple[str, float], ...], ...] = ((("a", -0.5),),)
    seconds_to_first_token: float = 8.0
    prompt_tokens: int = 100
    memory_tokens: int = 0
    restored_tokens: int = 0


@dataclass
class Report:
    bytes: int = 4_000_000_000
    lookup_seconds: float = 0.5
    fetch_seconds: float = 0.5
    copy_seconds: float = 1.0
    memcpy_seconds: float = 0.5
    memcpy_all_seconds: float = 0.25


COLD = Answer(prompt_tokens=97)
RESTORED = Answer(restored_tokens=99, seconds_to_first_token=2.0)


def hit(prompt_tokens: int = 100, seconds: float = 0.5) -> Answer:
    return Answer(
        prompt_tokens=prompt_tokens,
        memory_tokens=prompt_tokens - 1,
        seconds_to_first_token=seconds,
    )


def until_restored(repeat: int = 2) -> list[Answer]:
    """Cold, and as many hits as `repeat` takes."""
    return [COLD, *(hit(100 - left) for left in range(repeat, -1, -1))]


@dataclass
class Engine:
    answers: list[Answer]
    restarts: list[tuple[bool, bool]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    attention: str = "exact (avx2)"

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        self.asked.append(len(prompt))
        self.new_tokens.append(new_tokens)
        return Answer() if len(prompt) == 64 else self.answers.pop(0)  # the warm-up

    def again(self, *, reboot: bool, measure: bool) -> None:
        self.restarts.append((reboot, measure))

    def last_restore(self) -> Report:
        return Report()


def cases(engine: Engine, *tiers: str, repeat: int = 2) -> list[restore.RestoreCase]:
    return restore.measure(
        engine, lambda n: "x" * n, [100], tiers, lambda _line: None, repeat=repeat
    )


def run(engine: Engine, tier: str = "ram", repeat: int = 2) -> restore.RestoreCase:
    (case,) = cases(engine, tier, repeat=repeat)
    return case


def test_the_gain_is_cold_over_the_median_of_the_restored() -> None:
    seconds = (1.0, 4.0, 2.0, 100.0, 100.0, 100.0)
    restored = [replace(RESTORED, seconds_to_first_token=s) for s in seconds]
    case = run(Engine([*until_restored(3), *restored]), repeat=3)
    assert case.restored_seconds == (1.0, 4.0, 2.0)  # those with a memcpy beside are not
    assert case.gain == 8.0 / 2.0


def test_as_many_restarts_have_a_memcpy_beside_them() -> None:
    engine = Engine([*until_restored(), *[RESTORED] * 4])
    run(engine, tier="local")
    assert engine.restarts == [(True, False), (True, False), (True, True), (True, True)]


def test_shares_are_of_medians() -> None:
    engine = Engine([*until_restored(3), *[RESTORED] * 6])
    spent = iter((1.0, 9.0, 2.0))
    engine.last_restore = lambda: Report(copy_seconds=next(spent))  # type: ignore[method-assign]
    case = run(engine, repeat=3)
    assert case.copy_seconds == 2.0
    assert case.whole_seconds == 3.0


def test_cold_is_measured_once_for_all_tiers_after_the_weights_were_read() -> None:
    engine = Engine([*until_restored(), *[RESTORED] * 8])
    ram, local = cases(engine, "ram", "local")
    assert engine.asked[:2] == [64, 97]
    assert engine.asked.count(64) == engine.asked.count(97) == 1
    assert ram.cold_seconds == local.cold_seconds == 8.0
    assert (ram.tier, local.tier) == ("ram", "local")


def test_hits_are_of_a_prompt_that_grows_by_a_token_each_time() -> None:
    """A cache with windows has nothing else in memory, and no longer answer is in between."""
    answers = until_restored()
    answers[1:] = [hit(98, 9.0), hit(99, 0.2), hit(100, 0.4)]
    engine = Engine([*answers, *[RESTORED] * 4])
    case = run(engine)
    assert engine.asked[1:5] == [97, 98, 99, 100]
    assert engine.new_tokens[1:5] == [1, 1, 1, restore.NEW_TOKENS]
    assert case.hit_seconds == 0.4
    assert case.of_hit == 5.0
    assert case.as_json()["restored_of_hit"] == 5.0
    assert "0.400 s (5.00x)" in table("tiny", [case], "the same binary").rows[0]


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("found", [{"memory_tokens": 0}, {"restored_tokens": 1}])
def test_a_hit_that_was_computed_or_restored_is_none(at: int, found: dict[str, int]) -> None:
    answers = until_restored()
    answers[at] = replace(answers[at], **found)
    with pytest.raises(ResultDiffers, match="no in-memory hit"):
        run(Engine([*answers, *[RESTORED] * 4]))


def test_a_restore_that_begins_elsewhere_than_the_hit_is_an_error() -> None:
    with pytest.raises(ResultDiffers, match="64 tokens were restored"):
        run(Engine([*until_restored(), replace(RESTORED, restored_tokens=64)]))


def three_columns() -> restore.RestoreCase:
    """8 s by itself, 10 s by stock's best, 40 s by stock as it comes; 2 s restored."""
    case = run(Engine([*until_restored(), *[RESTORED] * 4]))
    best = Cold("stock without flash attention", 10.0)
    stock = {100: Baselines(best, Cold("stock with flash attention", 40.0))}
    (whole,) = restore.with_stock([case], [100], stock)
    return whole


def test_the_gain_is_against_the_same_engine_and_stock_stands_beside_it() -> None:
    case = three_columns()
    assert case.gain == 4.0
    assert case.gains == {"ours": 4.0, "best": 5.0, "default": 20.0}
    (row,) = table("tiny", [case], "the same binary").rows
    assert row[3:7] == [
        "8.000 s",
        "**4.00x**",
        "5.00x (10.0 s, without flash attention)",
        "20x (40.0 s, with flash attention)",
    ]


def test_json_names_the_attention_of_every_column() -> None:
    document = three_columns().as_json()
    assert document["gain"] == 4.0
    assert document["gains"] == {"ours": 4.0, "best": 5.0, "default": 20.0}
    ways = {name: cold["attention"] for name, cold in document["cold"].items()}
    assert ways == {
        "ours": "exact (avx2)",
        "best": "stock without flash attention",
        "default": "stock with flash attention",
    }
    alone = run(Engine([*until_restored(), *[RESTORED] * 4])).as_json()
    assert alone["cold"]["best"] is None
    assert alone["gains"] == {"ours": 4.0, "best": None, "default": None}


def test_every_length_gets_the_stock_of_its_own() -> None:
    short, long = (replace(three_columns(), prompt_tokens=n) for n in (100, 200))
    stock = {n: Baselines(default=Cold("stock", float(n))) for n in (100, 200)}
    found = restore.with_stock([short, short, long, long], [100, 200], stock)
    assert [case.stock.default.seconds for case in found if case.stock.default] == [
        100.0, 100.0, 200.0, 200.0
    ]  # fmt: skip


def test_a_cold_run_that_restored_something_is_none() -> None:
    with pytest.raises(ResultDiffers, match="cold"):
        run(Engine([RESTORED]))


def test_a_restart_that_restores_nothing_is_an_error() -> None:
    with pytest.raises(ResultDiffers, match="nothing was restored"):
        run(Engine([*until_restored(), Answer()]))


def test_one_bit_of_a_restored_answer_is_an_error() -> None:
    wrong = replace(RESTORED, logprobs=((("a", -0.5000001),),))
    with pytest.raises(ResultDiffers, match="differs"):
        run(Engine([*until_restored(), wrong]))


def test_throughput_stands_beside_that_of_memcpy() -> None:
    case = run(Engine([*until_restored(), *[RESTORED] * 4]))
    machine = Machine("cpu", 2, "8 GiB", "Linux", "2026-01-01", "abc", 0.5, 1.5)
    text = table("tiny", [case], "the same binary").markdown(
        machine, "Ollama 0.16.3", "tiering bench"
    )
    assert "| 500 + 500 + 1000 ms | 4.00 GB/s, 50 % / 25 % | 2.00 GB/s, 25 % / 12 % |" in text
    assert "| **4.00x** | not measured | not measured |" in text
    assert "attention exact (avx2)" in text
    assert "Stock: the same binary." in text
    assert "commit abc" in text


def test_what_was_not_measured_is_said_to_be_so() -> None:
    case = replace(run(Engine([*until_restored(), *[RESTORED] * 4])), memcpy_seconds=0.0)
    assert "not measured" in table("tiny", [case], "the same binary").rows[0]
