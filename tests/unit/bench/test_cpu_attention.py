"""One server at a time, the weights read before, and ratios against the exact attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ollama_tiering.bench import cpu_attention
from ollama_tiering.bench.cpu_attention import EXACT, FLASH, PLAIN, AttentionCase


@dataclass
class Generated:
    prompt_tokens: int
    seconds_to_first_token: float
    decode_tokens_per_second: float


@dataclass
class Machine:
    """What its servers were asked, in order; at most one may run."""

    log: list[str] = field(default_factory=list)
    running: int = 0

    @contextlib.contextmanager
    def server(self, name: str, seconds: float) -> Iterator[Engine]:
        self.running += 1
        assert self.running == 1
        yield Engine(self, name, seconds)
        self.running -= 1


@dataclass
class Engine:
    machine: Machine
    name: str
    seconds: float

    def generate(self, prompt: str, new_tokens: int) -> Generated:
        self.machine.log.append(f"{self.name} {len(prompt)}")
        return Generated(len(prompt), self.seconds, new_tokens / self.seconds)


def measured(machine: Machine) -> list[AttentionCase]:
    times = {EXACT: 2.0, PLAIN: 5.0, FLASH: 14.0}
    engines = {
        name: lambda name=name, seconds=seconds: machine.server(name, seconds)
        for name, seconds in times.items()
    }
    return cpu_attention.measure(engines, lambda n: "x" * n, [100, 200], lambda _text: None)


def test_one_server_at_a_time_reads_its_weights_before_it_is_measured() -> None:
    machine = Machine()
    cases = measured(machine)
    assert machine.log[:3] == [f"{EXACT} 64", f"{EXACT} 100", f"{EXACT} 200"]
    assert len(machine.log) == 9
    assert [(case.attention, case.prompt_tokens) for case in cases[:2]] == [
        (EXACT, 100),
        (EXACT, 200),
    ]


def test_ratios_are_those_of_one_length_and_stand_beside_their_bounds() -> None:
    table = cpu_attention.table("s", measured(Machine()))
    rows = {(row[0], row[1]): row for row in table.rows}
    assert rows["100", FLASH][3] == "7.00x (≥ 6.5x)"
    assert rows["200", PLAIN][5] == "2.50x (≥ 1.6x)"
    assert rows["200", EXACT][3] == ""


def test_without_the_exact_one_there_is_nothing_to_compare_with() -> None:
    case = AttentionCase(FLASH, 100, 3.0, 4.0)
    (row,) = cpu_attention.table("s", [case]).rows
    assert row[2:] == ["3.000 s", "", "4.0 tokens/s", ""]
    assert pytest.approx(3.0) == case.as_json()["seconds_to_first_token"]
