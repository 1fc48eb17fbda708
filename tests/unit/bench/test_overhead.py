"""Both servers get the same requests, in turns; a number is the median of ratios of pairs."""

from dataclasses import dataclass, field

import pytest

from ollama_tiering.bench import overhead
from ollama_tiering.bench.overhead import Measure, Pair


@dataclass
class Generated:
    seconds_to_first_token: float
    decode_tokens_per_second: float


@dataclass
class Server:
    name: str
    seconds: float
    log: list[tuple[str, str]] = field(default_factory=list)

    def generate(self, prompt: str, new_tokens: int) -> Generated:
        self.log.append((self.name, prompt))
        return Generated(self.seconds, 1 / self.seconds)

    def settle(self) -> None:
        self.log.append((self.name, "settled"))


def run(log: list[tuple[str, str]], **more: int) -> list[Measure]:
    numbers = {"pairs": 2, "bursts": 2, "burst_requests": 3, "new_tokens": 8} | more
    on, off = Server("on", 3.0, log), Server("off", 2.0, log)
    return overhead.measure(on, off, str, lambda _line: None, **numbers)


def test_the_order_turns_and_the_tiered_server_has_settled_before_the_next_request() -> None:
    log: list[tuple[str, str]] = []
    run(log, bursts=0)
    pairs = log[4:]  # after the two that read the weights
    assert pairs == [
        *[("on", "3"), ("on", "settled"), ("off", "3"), ("off", "settled")],
        *[("off", "4"), ("off", "settled"), ("on", "4"), ("on", "settled")],
    ]


def test_every_pair_has_a_prompt_of_its_own_and_both_servers_get_it() -> None:
    log: list[tuple[str, str]] = []
    run(log)
    asked = [entry for entry in log if entry[1] != "settled"]
    assert len(set(asked)) == len(asked)
    measured = asked[2:]
    assert {p for n, p in measured if n == "on"} == {p for n, p in measured if n == "off"}


def test_ratios_are_on_over_off() -> None:
    first, decode, burst = run([])
    assert first.median == pytest.approx(1.5)
    assert decode.median == pytest.approx(2 / 3)
    assert burst.name == "3 requests without a pause"


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    values = [(2.0, 1.0), (30.0, 10.0), (4.0, 4.0)]
    measure = Measure("m", "s", "lower", tuple(Pair(*pair) for pair in values))
    assert measure.median == 2.0
    assert measure.quartiles == (1.5, 2.5)


def test_the_table_tells_which_side_is_better() -> None:
    table = overhead.table("tiny", 512, 64, run([]), "exact (avx2)")
    assert "Attention, with tiering on and off: exact (avx2)" in " ".join(table.notes)
    rows = table.rows
    assert [row[-1] for row in rows] == ["lower", "higher", "lower"]
    assert rows[0][1] == "1.500"
