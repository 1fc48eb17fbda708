"""Stock's columns: one server at a time, each length once and cold, the faster way is its best."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ollama_tiering.bench import baselines
from ollama_tiering.bench.baselines import BEST, DEFAULT, NONE, OURS, Baselines, Cold

FLASH, PLAIN = "stock with flash attention", "stock without flash attention"


@dataclass
class Generated:
    seconds_to_first_token: float


@dataclass
class Server:
    log: list[str]
    flash: bool | None

    @property
    def attention(self) -> str:
        return FLASH if self.flash else PLAIN

    def generate(self, prompt: str, new_tokens: int) -> Generated:
        self.log.append(f"{self.attention} {len(prompt)}")
        return Generated(len(prompt) * (4.0 if self.flash else 1.5))


@dataclass
class Stock:
    """Runs with flash attention unless told otherwise; says so or does not."""

    says: bool = True
    log: list[str] = field(default_factory=list)
    running: int = 0

    @contextlib.contextmanager
    def start(self, flash: bool | None) -> Iterator[Server]:
        self.running += 1
        assert self.running == 1, "two servers would share the cores"
        yield Server(self.log, flash if flash is not None else (True if self.says else None))
        self.running -= 1


def measured(stock: Stock, *names: str, lengths: tuple[int, ...] = (100,)) -> dict[int, Baselines]:
    return baselines.measure(stock.start, lambda n: "x" * n, lengths, names, lambda _text: None)


def test_the_best_is_the_faster_way_and_the_default_is_the_one_ollama_takes() -> None:
    stock = Stock()
    found = measured(stock, OURS, BEST, DEFAULT, lengths=(100, 200))
    assert found[100] == Baselines(Cold(PLAIN, 150.0), Cold(FLASH, 400.0))
    assert found[200] == Baselines(Cold(PLAIN, 300.0), Cold(FLASH, 800.0))
    # two servers, not three: the default's way is known
    ways = [f"{way} {n}" for way in (FLASH, PLAIN) for n in (64, 100, 200)]
    assert stock.log == ways


def test_each_way_is_asked_for_where_the_default_does_not_say_what_it_does() -> None:
    stock = Stock(says=False)
    measured(stock, BEST, DEFAULT)
    assert len(stock.log) == 6  # three servers, each with a warm-up


def test_what_is_left_out_is_not_started() -> None:
    stock = Stock()
    assert measured(stock, OURS) == {100: NONE}
    assert not stock.log
    assert measured(stock, DEFAULT)[100] == Baselines(default=Cold(FLASH, 400.0))
    assert stock.log == [f"{FLASH} 64", f"{FLASH} 100"]
    assert measured(Stock(), BEST)[100] == Baselines(best=Cold(PLAIN, 150.0))


def test_the_weights_are_read_with_a_prompt_of_no_measured_length() -> None:
    stock = Stock()
    measured(stock, DEFAULT, lengths=(64, 65))
    assert stock.log == [f"{FLASH} {n}" for n in (66, 64, 65)]
