"""A number is the median of ratios of pairs, without what the order of starting does."""

from dataclasses import dataclass, field

import pytest

from measure import overhead
from measure.overhead import Measure, OnOff
from ollama_tiering.errors import ResultDiffers


@dataclass
class Generated:
    seconds_to_first_token: float
    decode_tokens_per_second: float


@dataclass(frozen=True)
class Counts:
    restored_tokens: int
    recomputed_tokens: int


@dataclass
class Server:
    """Prompts are 100 tokens; `keeps` says what it has of one that is asked again."""

    name: str
    seconds: float
    log: list[tuple[str, str]] = field(default_factory=list)
    keeps: str = "memory"
    hit_seconds: tuple[float, ...] = (0.5,)
    restored: int = 0
    recomputed: int = 0

    def generate(self, prompt: str, new_tokens: int) -> Generated:
        again = (self.name, prompt) in self.log
        self.log.append((self.name, prompt))
        self.restored += 99 if again and self.keeps == "tier" else 0
        self.recomputed += 1 if again and self.keeps else 100
        before = self.log.count((self.name, prompt)) - 2
        seconds = self.hit_seconds[before % len(self.hit_seconds)] if again else self.seconds
        return Generated(seconds, 1 / self.seconds)

    def settle(self) -> Counts:
        self.log.append((self.name, "settled"))
        return Counts(self.restored, self.recomputed)

    def stop(self) -> None:
        self.log.append((self.name, "stopped"))

    def resume(self) -> None:
        self.log.append((self.name, "started"))


def run(
    log: list[tuple[str, str]], on: Server | None = None, off: Server | None = None, **more: int
) -> list[Measure]:
    numbers = {"pairs": 2, "starts": 1, "bursts": 2, "burst_requests": 3, "new_tokens": 8} | more
    on, off = on or Server("on", 3.0, log), off or Server("off", 2.0, log)
    return overhead.measure(on, off, str, lambda _line: None, **numbers)


def test_decode_is_the_median_of_all_answers_of_a_side() -> None:
    class Slower(Server):
        def generate(self, prompt: str, new_tokens: int) -> Generated:
            rates = (1.0, 5.0, 7.0, 9.0)
            asked = [entry for entry in self.log if entry == (self.name, prompt)]
            answer = super().generate(prompt, new_tokens)
            return Generated(answer.seconds_to_first_token, rates[len(asked) % len(rates)])

    log: list[tuple[str, str]] = []
    decode = run(log, Slower("on", 3.0, log), Server("off", 2.0, log))[1]
    assert decode.pairs == (OnOff(6.0, 0.5),) * 2  # one start, the tiered server first


def test_ratios_are_on_over_off() -> None:
    first, decode, hit, burst = run([])
    assert first.median == pytest.approx(1.5)
    assert decode.median == pytest.approx(2 / 3)
    assert hit.median == 1.0
    assert burst.name == "3 requests without a pause"


def test_a_hit_is_the_median_of_a_few_requests() -> None:
    log: list[tuple[str, str]] = []
    on = Server("on", 3.0, log, hit_seconds=(0.2, 9.0, 0.6))
    off = Server("off", 2.0, log, hit_seconds=(0.1, 0.3, 0.2))
    hit = run(log, on, off)[2]
    assert hit.pairs == (OnOff(0.6, 0.2),) * 2


@pytest.mark.parametrize("keeps", ["tier", ""])
def test_what_comes_from_a_tier_or_is_computed_again_is_no_hit(keeps: str) -> None:
    log: list[tuple[str, str]] = []
    with pytest.raises(ResultDiffers, match="same prompt"):
        run(log, Server("on", 3.0, log, keeps=keeps))


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    values = [(2.0, 1.0), (30.0, 10.0), (4.0, 4.0)]
    measure = Measure("m", "s", "lower", tuple(OnOff(*pair) for pair in values))
    assert measure.median == 2.0
    assert measure.quartiles == (1.5, 2.5)


def test_each_server_is_started_first_as_often_as_the_other_and_the_order_is_taken_out() -> None:
    log: list[tuple[str, str]] = []
    measures = run(log, pairs=8, starts=4, bursts=4)
    started = [name for name, what in log if what == "started"]
    assert started == ["off", "on", "on", "off", "off", "on"]  # the first start was not ours
    for measure in measures:
        orders = [pair.on_was_first for pair in measure.pairs]
        assert orders.count(True) == orders.count(False) == len(orders) / 2


def test_what_the_order_of_starting_does_to_both_is_no_cost_of_the_tiering() -> None:
    """Whoever is started first takes 1.1 times as long; the tiering costs nothing."""
    first = [OnOff(1.1, 1.0, True), OnOff(2.2, 2.0, True), OnOff(11.0, 10.0, True)]
    second = [OnOff(1.0, 1.1, False)]
    measure = Measure("m", "s", "lower", (*first, *second))
    assert measure.median == pytest.approx(1.0)
    assert measure.quartiles == (pytest.approx(1.0), pytest.approx(1.0))
    tiered = tuple(OnOff(1.2 * p.on, p.off, p.on_was_first) for p in measure.pairs)
    assert Measure("m", "s", "lower", tiered).median == pytest.approx(1.2)


def test_the_table_tells_which_side_is_better() -> None:
    table = overhead.table("tiny", 512, 64, 3, run([]), "exact (avx2)")
    assert "Attention, with tiering on and off: exact (avx2)" in " ".join(table.notes)
    rows = table.rows
    assert [row[-1] for row in rows] == ["lower", "higher", "lower", "lower"]
    assert rows[0][1] == "1.500"
